"""What verify makes of the reproducers' answers, how it shows them, and that it runs wherever it is called."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys

import pytest

import patches
from patches.engine.gate import Verdict
from patches.engine.report import Status
from patches import verification
from patches.verification import PHASES, Row, Verification, _judged
from patches.verification import asking
from patches.verification.progress import progress_bar
from tests.engine.conftest import patch

FITS = Verdict(Status.AVAILABLE, "", {"packaging": "24"})
NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
PAST = Verdict(Status.NOT_AFFECTED, "packaging 24 is outside <1", {"packaging": "24"})


def said(*answers: bool | None, figure: str = "figure") -> dict:
    return {phase: (answer, figure) for phase, answer in zip(PHASES, answers)}


@pytest.mark.parametrize(
    ("verdict", "answers", "expected"),
    [
        (FITS, (True, False, False, True), "ok"),
        (FITS, (False, False, False, False), "wrong"),  # the defect cannot be shown: nothing to claim
        (FITS, (True, True, False, True), "wrong"),  # it does not repair alone
        (FITS, (True, False, True, True), "wrong"),  # it does not repair beside the others
        (FITS, (True, False, False, False), "wrong"),  # revert left something behind
        (FITS, (True, None, False, True), "wrong"),  # the reproducer raised
        (PAST, (False,), "ok"),
        (PAST, (True,), "wrong"),  # the range is too narrow
        (PAST, (None,), "cannot show"),  # an older release may lack what the reproducer calls
        (Verdict(Status.NOT_INSTALLED, "x is not installed", {}), (), "skipped"),
        (Verdict(Status.UNTESTED, "newer", {}), (True,), "skipped"),
    ],
)
def test_judged(verdict, answers, expected):
    requires = ("packaging<1",) if verdict is PAST else ("packaging",)
    row = _judged(patch("a", requires=requires).parts[0], verdict, said(*answers))
    assert row.verdict == expected
    if expected == "wrong":
        assert "figure" in row.reason and Verification((row,)).ok is False


def test_a_defect_that_another_package_keeps_us_from_repairing_is_said_to_be_there():
    row = _judged(patch("a", requires=("packaging", "torch>=99")).parts[0], PAST, said(True))
    assert row.verdict == "skipped" and "this release has the defect" in row.reason


def test_a_host_that_cannot_show_it_is_no_failure_and_no_success():
    row = _judged(patch("a").parts[0], FITS, said(None, figure="cannot show: no AVX512-BF16 here"))
    assert (row.verdict, row.reason) == ("cannot show", "no AVX512-BF16 here")
    assert "1 cannot show" in str(Verification((row,)))


# -- how it shows --------------------------------------------------------------------------------

LONG = "load_state_dict of its own state_dict: Loading a quantized checkpoint into a non-quantized Linear8bitLt"
WIDEST = "bitsandbytes-linear4bit-sharded-state-dict"
MIXED = Verification(
    (
        Row("wrong-one", "wrong", "patched: figure", said(True, True, False, None)),
        Row(WIDEST, "ok", "", said(True, False, False, True, figure=LONG)),
        Row("absent-one", "skipped", "x is not installed", {}),
        Row("short-one", "ok", "", said(True, False, False, True, figure="1 of 2")),
    )
)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_table_fits_the_terminal(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = str(MIXED).splitlines()
    assert max(map(len, lines)) <= max(width, len(f"skipped  {WIDEST}"))
    assert sum(LONG[:20] in line for line in lines) == 2, "unpatched and patched, each on a line that is wide enough"
    assert sum(line.endswith("Linear8bitLt") for line in lines) == 2
    if width == 120:
        assert any(line.endswith("  unpatched: 1 of 2; patched: 1 of 2") for line in lines)


def test_what_is_wrong_comes_last_with_every_phase_and_what_it_must_be(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert str(MIXED).splitlines()[-8:] == [
        "",
        "wrong    wrong-one",
        "    unpatched: present: figure",
        "    patched: must be absent, is present: figure",
        "    all: absent: figure",
        "    reverted: must be present, is ERROR: figure",
        "",
        "4 reproducers: 2 ok, 1 skipped, 1 wrong",
    ]


def test_in_a_notebook_it_is_a_table():
    row = Row("a", "wrong", "'<' not supported", said(True, None, figure="<lambda> & co"))
    source = Verification((MIXED.rows[1], row))._repr_html_()
    assert source.index("<b>wrong</b>") < source.index(">ok<")
    assert "&#x27;&lt;&#x27; not supported" in source and "ERROR: &lt;lambda&gt; &amp; co" in source
    assert "<p>2 reproducers: 1 ok, 1 wrong</p>" in source and "color" not in source


# -- running -------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_processes_at_a_time_is_an_error(jobs):
    with pytest.raises(ValueError, match=f"1 or more, not {jobs}"):
        patches.verify(jobs=jobs)


def test_by_default_one_process_for_each_processor_at_most_four(monkeypatch):
    asked = []
    monkeypatch.setattr(asking, "ask_processes", lambda *arguments: asked.append(arguments[-1]) or (_ for _ in ()))
    monkeypatch.setattr(verification.gate, "check", lambda *_, **__: Verdict(Status.NOT_INSTALLED, "", {}))
    for processors, expected in ((1, 1), (3, 3), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=processors: range(n), raising=False)
        verification.verify()
        assert asked.pop() == expected
    verification.verify(jobs=7)
    assert asked == [7]


def test_progress_is_a_bar_where_tqdm_is_installed(capsys):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    with progress_bar("verify", 2, True) as advance:
        advance()
    assert "verify" in capsys.readouterr().err
    for total, progress in ((2, False), (0, True)):
        with progress_bar("verify", total, progress) as advance:
            advance()
    assert capsys.readouterr() == ("", "")


def test_progress_is_a_line_where_tqdm_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress_bar("verify", 12, True) as advance:
        advance()
        advance()
    out, err = capsys.readouterr()
    assert (out, err.split("\r")[1:4]) == ("", ["verify: 0 of 12", "verify: 1 of 12", "verify: 2 of 12"])
    assert err.endswith(f"\r{' ' * len('verify: 12 of 12')}\r"), "it is wiped in the end"


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "there is none"])
def test_progress_on_a_standard_error_that_cannot_be_written_is_nothing(monkeypatch, closed):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    with progress_bar("verify", 2, True) as advance:
        advance()


CHEAP = "bitsandbytes-int8-input-dimensions"
IN_A_SCRIPT = f"""
import bnb_patches_autoload, os, sys
with open(sys.argv[1], "a") as runs:
    runs.write("run ")
os.environ["PATCHES_AUTOLOAD"] = "0"
bnb_patches_autoload.start()
import bnb_patches
changes = []
sys.addaudithook(lambda event, _: changes.append(event) if "putenv" in event or "unsetenv" in event else None)
print(bnb_patches.verify("{CHEAP}", jobs=2).to_json(None))
assert "torch" not in sys.modules, "nothing heavy is imported for it here"
assert not changes, "other threads read the environment"
"""


@NEEDS_TORCH
@pytest.mark.parametrize("way", ["file", pytest.param("stdin", marks=pytest.mark.release("file"))])
def test_in_a_script_without_a_main_guard_under_the_other_name_of_the_plugin(tmp_path, way):
    """A child that imports the main module would run the script again; one from stdin, as in a notebook, has no file.

    Beside the script lies a module of its user's that is named ``patches``.
    """
    (tmp_path / "patches.py").write_text("raise SystemExit('the user module ran')")
    (tmp_path / "script.py").write_text(IN_A_SCRIPT)
    command = [sys.executable, "script.py" if way == "file" else "-", "runs"]
    env = {**os.environ, "PATCHES_AUTOLOAD": "1"}
    with open(tmp_path / "script.py") as script:
        done = subprocess.run(command, stdin=script, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["verdict"] == "ok", row
    assert list(row["findings"]) == list(PHASES)
    assert (tmp_path / "runs").read_text() == "run "
