"""What verify makes of the reproducers' answers, and what the command line makes of that."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys

import pytest

from patches import REGISTRY
from patches.features import verify as verification
from patches.__main__ import main
from patches.engine.gate import Verdict
from patches.engine.report import Status
from patches.features.verify import PHASES, Row, Verification, _judged
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
    row = _judged(patch("a", requires=requires), verdict, said(*answers))
    assert row.verdict == expected
    if expected == "wrong":
        assert "figure" in row.reason and Verification((row,)).ok is False


def test_a_defect_that_another_package_keeps_us_from_repairing_is_said_to_be_there():
    row = _judged(patch("a", requires=("packaging", "torch>=99")), PAST, said(True))
    assert row.verdict == "skipped" and "the defect is there" in row.reason


def test_a_host_that_cannot_show_it_is_no_failure_and_no_success():
    row = _judged(patch("a"), FITS, said(None, figure="cannot show: no AVX512-BF16 here"))
    assert (row.verdict, row.reason) == ("cannot show", "no AVX512-BF16 here")
    assert "1 cannot show" in str(Verification((row,)))


def test_a_reproducer_that_kills_its_process_is_an_answer(monkeypatch):
    monkeypatch.setattr(verification, "_child", _dies)
    answer = verification._run(multiprocessing.get_context("fork"), "any", "unpatched")
    assert answer == (None, "the process died with exit code 7")


def _dies(*_):
    os._exit(7)


@NEEDS_TORCH
def test_one_reproducer_through_the_command_line():
    first = next(iter(REGISTRY.patches))
    run = [sys.executable, "-m", "patches", "verify", first, "--json"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["id"] == first and row["verdict"] in ("ok", "cannot show")


@pytest.mark.parametrize("ok", [True, False])
def test_the_exit_code_of_verify(monkeypatch, capsys, ok):
    row = Row("a", "ok" if ok else "wrong", "", said(True, False))
    monkeypatch.setattr(verification, "verify", lambda *a, **k: Verification((row,)))
    assert main(["verify"]) == (0 if ok else 1)
    assert "figure" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["list", "report", "diff", "verify"])
def test_an_unknown_id_is_exit_code_2_and_one_line(capsys, command):
    assert main([command, "bitsandbytes-nonsense"]) == 2
    err = capsys.readouterr().err
    assert "no patch is named 'bitsandbytes-nonsense'" in err and err.count("\n") == 1


@pytest.mark.parametrize("json_", [False, True])
def test_list(capsys, json_):
    assert main(["list", *(["--json"] if json_ else [])]) == 0
    out = capsys.readouterr().out
    ids = [row["id"] for row in json.loads(out)] if json_ else out
    assert all(patch_id in ids for patch_id in REGISTRY.patches)


@NEEDS_TORCH
def test_report_and_diff_in_a_fresh_process(fresh):
    source = "import sys; from patches.__main__ import main; sys.exit(main(sys.argv[1:]))"
    results = json.loads(fresh(source, "report", "--json"))["results"]
    assert {r["id"] for r in results} == set(REGISTRY.patches)
    applied = [r["id"] for r in results if r["status"] == "applied"]
    assert applied
    assert "--- a/" in fresh(source, "diff", applied[0])
    assert set(json.loads(fresh(source, "diff", "--json"))) == set(applied)


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
        "4 patches: 2 ok, 1 skipped, 1 wrong",
    ]


def test_in_a_notebook_it_is_a_table():
    row = Row("a", "wrong", "'<' not supported", said(True, None, figure="<lambda> & co"))
    source = Verification((MIXED.rows[1], row))._repr_html_()
    assert source.index("<b>wrong</b>") < source.index(">ok<")
    assert "&#x27;&lt;&#x27; not supported" in source and "ERROR: &lt;lambda&gt; &amp; co" in source
    assert "<p>2 patches: 1 ok, 1 wrong</p>" in source and "color" not in source
