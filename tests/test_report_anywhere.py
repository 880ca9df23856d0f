"""``report``, ``diff`` and ``--json`` answer whatever the packages around do; what is seen first is what one acts on."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from patches import REGISTRY, Status
from patches.command_line import colour, explain, glance, main
from patches.engine.report import Report, Result
from patches import symptoms
from tests import forks

NEEDS_STACK = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="what the patches are for is not installed"
)
PEFT = "transformers-input-grads-hook"


def run(*arguments: str, before: tuple[str, ...] = (), path: Path | None = None, **environ: str):
    known = os.environ.get("PYTHONPATH", "")
    env = {**os.environ, "PATCHES_AUTOLOAD": "1", "PYTHONPATH": f"{path}{os.pathsep}{known}" if path else known}
    command = [sys.executable, *before, "-m", "patches", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**env, **environ}, timeout=300)


MANY = """
import contextlib, io, json, os, sys
from patches.command_line import main
answers = []
for line, environ in json.loads(sys.argv[1]):
    os.environ.update(environ)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(line)
    answers.append((code, out.getvalue(), err.getvalue()))
sys.__stdout__.write("\\n" + json.dumps(answers))
"""


def answers(
    *lines: tuple[str, ...], path: Path | None = None, environs: Sequence[Mapping[str, str]] = (), **environ: str
) -> list[tuple[int, str, str]]:
    """Exit code, output and complaints of each command, one after the other in a process that has imported torch.

    ``environs``: what each has in its environment; ``environ``: what the process has from its start.
    """
    asked = json.dumps([*zip(lines, environs or [{}] * len(lines))])
    known = os.environ.get("PYTHONPATH", "")
    env = {**os.environ, "PATCHES_AUTOLOAD": "1", "PYTHONPATH": f"{path}{os.pathsep}{known}" if path else known}
    env |= environ
    if path and any((path / name).is_dir() for name in ("accelerate", "torchao")):  # which such a process has imported
        done = subprocess.run([sys.executable, "-c", MANY, asked], capture_output=True, text=True, env=env, timeout=300)
    else:
        (done,) = forks.run(forks.Program(["-c", MANY, asked], env), timeout=300)
    assert done.returncode == 0, done.stderr
    return [tuple(each) for each in json.loads(done.stdout.splitlines()[-1])]


# -- what is around ------------------------------------------------------------------------------


@NEEDS_STACK
@pytest.mark.parametrize(
    "package, error",
    [("torchao", "AttributeError"), ("peft", "RuntimeError"), ("accelerate", "OSError"), ("trl", "SystemExit")],
)
def test_a_neighbour_that_cannot_be_imported_is_a_note(tmp_path, package, error):
    """Packages that were built for another torch raise what they like."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise {error}('built for another torch')\n")
    (tmp_path / f"{package}-9.dist-info").mkdir()
    version = importlib.util.find_spec(package) and __import__("importlib.metadata").metadata.version(package)
    if not version:
        pytest.skip(f"{package} is not installed")
    (tmp_path / f"{package}-9.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    ids = [p.id for p in REGISTRY.patches.values() if p.package == package][:2]
    lines = (("report", "--live", *ids), ("report", "--live", "--json", *ids), ("diff", *ids))
    shown, data, diff = answers(*lines, path=tmp_path)
    assert shown[0] == 0 and all(patch_id in shown[1] for patch_id in ids), shown[2]
    assert f"{error}: built for another torch" in shown[1]
    found = json.loads(data[1])
    assert [r["id"] for r in found["results"]] == ids and str(found["notes"]).count(error) == 1
    assert diff[0] == 0 and error in diff[2]


@NEEDS_STACK
def test_a_conflict_under_patches_strict_is_a_row(tmp_path):
    """The variable is for programs: `report` shows what does not fit, and its exit code says so."""
    import bitsandbytes
    import shutil

    copy = shutil.copytree(Path(bitsandbytes.__file__).parent, tmp_path / "bitsandbytes")
    file = copy / "nn/modules.py"
    text = file.read_text()
    at = text.index("def forward(self, x", text.index("class Linear4bit"))
    old = "quant_state = self.weight.quant_state"
    changed = text[at:].replace(old, f"{old} or None", 1)
    assert changed != text[at:]
    file.write_text(text[:at] + changed)
    strict = {"PATCHES_STRICT": "1"}
    shown, data, diff = answers(("report",), ("report", "--json"), ("diff",), path=tmp_path, environs=(strict,) * 3)
    assert shown[0] == 1 and "conflict: bitsandbytes-" in shown[1], shown[2]
    assert data[0] == 1 and "conflict" in {r["status"] for r in json.loads(data[1])["results"]}
    assert diff[0] == 0


@pytest.mark.release("the other reports here, where a warning is no error")
@NEEDS_STACK
def test_with_warnings_as_errors(tmp_path):
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text("import warnings\nwarnings.warn('old')\n")
    (tmp_path / "trl-0.dist-info").mkdir()
    (tmp_path / "trl-0.dist-info" / "METADATA").write_text("Name: trl\nVersion: 0.24.0\n")
    done = run("report", "--live", "--json", before=("-W", "error"), path=tmp_path)
    assert done.returncode in (0, 1) and len(json.loads(done.stdout)["results"]) == len(REGISTRY.patches), done.stderr
    assert "ResourceWarning" not in done.stderr, "a file of ours stayed open"


def test_without_docstrings():
    done = run("list", PEFT, before=("-OO",))
    assert done.returncode == 0 and PEFT in done.stdout, done.stderr
    done = run("explain", PEFT, before=("-OO",))
    assert done.returncode == 0 and "get_input_embeddings" in done.stdout, "the texts are no docstrings"
    assert "usage: python -m patches" in run("--help", before=("-OO",)).stdout


@NEEDS_STACK
def test_where_no_program_gets_any_the_report_does_not_say_applied():
    line = ("report", PEFT, "--json")
    off, on = answers(line, line, environs=({"PATCHES_AUTOLOAD": "0"}, {"PATCHES_AUTOLOAD": "1"}))
    found = json.loads(off[1])
    (row,) = found["results"]
    assert row["status"] == "available" and "patches.apply()" in row["reason"] and not row["changes"]
    assert any("PATCHES_AUTOLOAD is off" in note for note in found["notes"])
    assert json.loads(on[1])["results"][0]["status"] == "applied"


# -- at a glance ---------------------------------------------------------------------------------


def result(patch_id: str, status: Status, reason: str = "", **more) -> Result:
    return Result(patch_id, "what goes wrong", status, reason, **more)


def test_total_first_then_what_one_acts_on_then_the_groups():
    fine = [result(i, Status.APPLIED) for i in REGISTRY.patches]
    bad = {
        fine[0].id: result(fine[0].id, Status.CONFLICT, "the source moved"),
        fine[1].id: result(fine[1].id, Status.UNTESTED, "it is new"),
        fine[2].id: result(fine[2].id, Status.APPLIED, notes=("layer x lost its scales",)),
    }
    lines = glance.report(Report(tuple(bad.get(r.id, r) for r in fine), ("a note",))).splitlines()
    assert lines[0].startswith(f"{len(fine)} patches: {len(fine) - 2} applied")
    text = "\n".join(lines)
    order = [text.index(part) for part in (f"conflict: {fine[0].id}: the source moved", f"untested: {fine[1].id}",
             f"note: {fine[2].id}: layer x lost its scales", "note: a note", "Training: ")]  # fmt: skip
    assert order == sorted(order)
    assert all(f"{title}: " in text for title in symptoms.GROUPS.values())
    assert not any(r.id in text for r in fine[3:]) and len(lines) < 30


def test_all_that_is_not_applied_is_listed_by_its_reason_with_what_one_may_act_on_first():
    ids = [*REGISTRY.patches][:9]
    found = Report((
        result(ids[0], Status.APPLIED),
        result(ids[1], Status.NOT_INSTALLED, "peft is not installed"),
        result(ids[2], Status.NOT_AFFECTED, "peft 0.21 is outside >=0.14,<0.16"),
        result(ids[3], Status.NOT_AFFECTED, "peft 0.21 is outside <0.17"),
        result(ids[4], Status.NOT_AFFECTED, "torch 2.5 is too old: 2.6 or later is needed"),
        result(ids[5], Status.DISABLED, "PATCHES_DISABLE names it or its group"),
        result(ids[6], Status.UNTESTED, "it is new"),
        result(ids[7], Status.DISABLED, "PATCHES_DISABLE names it or its group"),
        result(ids[8], Status.AVAILABLE, "PATCHES_AUTOLOAD is off"),
    ))  # fmt: skip
    lines = " ".join(glance.report(found).split())
    expected = (
        f"untested: {ids[6]}: it is new; without it: what goes wrong",
        f"disabled: PATCHES_DISABLE names it or its group: {ids[5]}, {ids[7]}",
        f"available: PATCHES_AUTOLOAD is off: {ids[8]}",
        f"not affected: peft 0.21 is outside the range of: {ids[2]} (>=0.14,<0.16), {ids[3]} (<0.17)",
        f"not affected: torch 2.5 is too old: 2.6 or later is needed: {ids[4]}",
        f"not installed: peft is not installed: {ids[1]}",
    )
    places = [lines.index(line) for line in expected]
    assert places == sorted(places) and ids[0] not in lines


@NEEDS_STACK
def test_all_has_a_line_for_each_patch_and_without_it_a_screen():
    (_, short, _), (_, whole, _) = answers(("report",), ("report", "--all"))
    assert len(short.splitlines()) < 40 < len(whole.splitlines())
    assert all(patch_id in whole for patch_id in REGISTRY.patches)


def test_list_is_in_groups(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [f"{title} ({key})" for key, title in symptoms.GROUPS.items()]
    assert [line for line in lines if line in heads] == heads
    places = {line.split()[0]: at for at, line in enumerate(lines) if line.split()[:1]}
    assert places.keys() >= REGISTRY.patches.keys()
    for head, group in zip(heads, symptoms.GROUPS):
        own = sorted(places[patch.id] for patch in REGISTRY.patches.values() if patch.groups[0] == group)
        assert own[0] > lines.index(head) and len([at for at in own if not lines[at - 1].strip()]) <= 1, group


# -- one patch, or a message ---------------------------------------------------------------------


@pytest.mark.parametrize("text, patch_id", [
    ("peft-adapters-on-meta", "peft-adapters-on-meta"),
    ("RuntimeError: Function MmBackward0 returned an invalid gradient at index 1 - expected device meta but got cpu",
     "peft-adapters-on-meta"),
    ("expected device meta but", "peft-adapters-on-meta"),
    ("You can't train a model that has been loaded in 8-bit", "accelerate-refuses-offloaded-training"),
    ("graph splits embedding", "transformers-input-grads-hook"),
])  # fmt: skip
def test_explain(capsys, text, patch_id):
    assert main(["explain", *text.split(), "--json"]) == 0
    assert patch_id in [row["id"] for row in json.loads(capsys.readouterr().out)]
    assert main(["explain", text]) == 0
    assert patch_id in capsys.readouterr().out


@pytest.mark.parametrize("patch_id", REGISTRY.patches)
def test_each_page_has_its_five_headings(patch_id):
    patch = REGISTRY.patches[patch_id]
    found = explain.sections(patch, result(patch_id, Status.PENDING))
    assert tuple(found) == explain.HEADINGS and all(found.values())
    assert all(all(paragraphs) for paragraphs in found.values())


def test_a_page_marks_messages_and_bounds_each_part():
    patch = REGISTRY.patches["peft-load-adapter-offloaded"]
    page = " ".join(explain.page(patch, result(patch.id, Status.PENDING)).split())
    assert patch.messages and all(f" Message: {message.text} " in page for message in patch.messages)
    assert len({(part.package, part.tested_up_to) for part in patch.parts}) == len(patch.parts)
    for part in patch.parts:
        required = ", ".join(part.requires)
        assert f" - {part.name}: {required}, tested up to {part.package} {part.tested_up_to}" in page


def test_what_nobody_knows_is_exit_code_1_and_one_line(capsys):
    assert main(["explain", "an error that was never seen anywhere qqq"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "python -m patches list" in err


@pytest.mark.parametrize("patch_id", REGISTRY.patches)
def test_what_a_repair_costs_is_said_where_it_is_looked_for(patch_id):
    patch = REGISTRY.patches[patch_id]
    texts = f"{patch.why}\n{patch.repair}"
    said = re.search(r"\bcosts?\b|\bslower\b|\bfaster\b|\bas fast\b|\btakes? (?:no|as|more|less|\d)", texts)
    assert not said, f"{said[0]!r} belongs into the field `cost`"


# -- colour --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command, text, painted", [
    ("report", "3 patches: 2 applied, 1 conflict", "3 patches: 2 \x1b[32mapplied\x1b[0m, 1 \x1b[31mconflict\x1b[0m"),
    ("report", "note: not applied", "\x1b[33mnote\x1b[0m: not applied"),
    ("verify", "ok  a-b\n    unpatched: ok", "\x1b[32mok\x1b[0m  a-b\n    unpatched: ok"),
    ("diff", "+++ b/f\n@@ -1 +1 @@\n-x\n y", "\x1b[1m+++ b/f\x1b[0m\n\x1b[36m@@ -1 +1 @@\x1b[0m\n\x1b[31m-x\x1b[0m\n y"),
    ("explain", "a-b\n\nCost\n  Cost", "\x1b[1ma-b\x1b[0m\n\n\x1b[1mCost\x1b[0m\n  Cost"),
    ("list", "On a CPU (cpu)\na-b  c (d)", "\x1b[1mOn a CPU (cpu)\x1b[0m\na-b  c (d)"),
])  # fmt: skip
def test_colour_says_which_state_or_line_it_is(command, text, painted):
    assert colour.painted(text, command) == painted


@pytest.mark.skipif(os.name != "posix", reason="there is no terminal to open")
def test_colour_is_for_terminals_and_asked_for_otherwise():
    """Not for pipes, ``--json`` and ``NO_COLOR``."""
    import pty

    def shown(*arguments: str, **environ: str) -> bool:
        screen, out = pty.openpty()
        env = {**os.environ, "NO_COLOR": "", "TERM": "xterm", **environ}
        subprocess.run([sys.executable, "-m", "patches", "explain", PEFT, *arguments], stdout=out, env=env, timeout=300)
        text = os.read(screen, 65536)
        os.close(screen), os.close(out)
        return b"\x1b[" in text

    assert "\x1b[" not in run("list").stdout and "\x1b[1m" in run("list", FORCE_COLOR="1").stdout
    assert shown() and not shown("--json") and not shown(NO_COLOR="1") and not shown(TERM="dumb")
