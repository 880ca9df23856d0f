"""Settings, and what comes before and after, on a release that nobody has tested: one program for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.newer_releases import copies, programs

pytestmark = copies.NEEDS_NEWEST
NUMBER = copies.NUMBERS["bitsandbytes"]
LEFT_OUT = "bitsandbytes-int8-copies"
CHANGE = {
    "functional.py": copies.replace("int8_vectorwise_quant.default(A, threshold)", "int8_vectorwise_quant.default(1 * A, threshold)")
}  # fmt: skip
START = f"""{programs.LOG}
import contextlib, io, os, sys, threading
import bitsandbytes, bitsandbytes.optim
import patches
warnings = [text for level, text in lines if level == "WARNING"]
state = lambda name="bitsandbytes-int8-copies": patches.report(name)[name]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("changed")
    copies.copy(folder, "bitsandbytes", NUMBER, CHANGE)
    later = copies.replace("def get_base_layer(self)", "def get_base_layer(self, *, late=None)")
    copies.copy(folder, "peft", copies.NUMBERS["peft"], {"tuners/tuners_utils.py": later})
    return folder


@pytest.fixture
def said(folder, forked, repaired):
    """What a program prints as JSON that imports the copy, with more variables in its environment."""

    begin, end = START.split("import bitsandbytes, ")

    def run(source: str, before: str = "", **environ: str):
        env = {**programs.environment(folder, repaired), **environ}
        return json.loads(forked(f"{begin}{before}\nimport bitsandbytes, {end}{source}", **env).splitlines()[-1])

    return run


def test_a_variable_forces_all_and_no_line_is_said(said):
    source = """
left = [r.id for r in patches.report() if r.status == "untested" and r.id.startswith("bitsandbytes-")]
print(json.dumps([state().status, warnings, left]))
"""
    assert said(source, PATCHES_UNTESTED="1") == ["applied", [], []]


def test_a_call_forces_one_and_revert_is_exact(said):
    source = """
from bitsandbytes.nn import Int8Params
def snapshot():
    return {name: id(value) for name, value in vars(Int8Params).items()}
before, without = state().status, snapshot()
other = patches.report("bitsandbytes-int8-load-state-dict")["bitsandbytes-int8-load-state-dict"].status
patches.apply("bitsandbytes-int8-copies", untested=True)
forced, changed = state().status, snapshot() != without
patches.revert("bitsandbytes-int8-copies")
print(json.dumps([before, other, forced, changed, state().status, snapshot() == without]))
"""
    assert said(source) == ["untested", "untested", "applied", True, "reverted", True]


def test_what_is_applied_because_its_source_is_known_is_reverted_exactly(said):
    source = """
from bitsandbytes.nn import Linear4bit, Params4bit
patches.revert()
def snapshot():
    codes = [getattr(value, "__code__", value) for kind in (Linear4bit, Params4bit) for value in vars(kind).values()]
    return [id(code) for code in codes]
without = snapshot()
patches.apply()
known, changed = state("bitsandbytes-params4bit-copies").status, snapshot() != without
patches.revert()
print(json.dumps([known, changed, snapshot() == without]))
"""
    assert said(source) == ["applied", True, True]


def test_what_is_disabled_stays_so_even_where_all_is_forced(said):
    source = """
print(json.dumps([state().status, state("bitsandbytes-params4bit-copies").status, warnings]))
"""
    disabled = f"{LEFT_OUT},bitsandbytes-params4bit-copies"
    assert said(source, PATCHES_DISABLE=disabled, PATCHES_UNTESTED="1") == ["disabled", "disabled", []]


def test_a_file_that_counts_for_nothing_is_one_more_line_and_one_note(said, tmp_path):
    """Also where peft comes later, whose release is new too; nothing breaks, and nothing is adopted."""
    missing = tmp_path / "missing.json"
    source = """
import peft
warnings = [text for level, text in lines if level == "WARNING"]
print(json.dumps([warnings, [note for note in patches.report().notes if "PATCHES_ADOPTED" in note], state().status]))
"""
    warnings, notes, status = said(source, PATCHES_ADOPTED=str(missing))
    text = f"PATCHES_ADOPTED={missing}: there is no such file; `python -m patches adopt` writes it"
    assert [each for each in warnings if each == text] == [text] and notes == [text]
    assert status == "untested" and len(warnings) == 3
    (first,) = [each for each in warnings if f" of bitsandbytes {NUMBER}. To" in each]
    (second,) = [each for each in warnings if f" of peft {copies.NUMBERS['peft']}. To" in each]
    assert "patches of" in first and "patches of" in second


def test_without_a_home_the_import_works(said):
    """As in a container with a user that has no name: neither HOME nor the list of users has a folder."""
    source = """
print(json.dumps([state().status, state("bitsandbytes-params4bit-copies").status, len(warnings)]))
"""
    nobody = """
import pwd
for name in ("HOME", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
"""
    assert said(source, before=nobody) == ["untested", "applied", 1]


def test_the_command_says_the_same_as_a_program(said):
    source = """
patches.REGISTRY.import_targets(*filter(patches.REGISTRY.is_for, patches.REGISTRY.patches.values()))
here = {result.id: [result.status, result.reason] for result in patches.report()}
from patches.command_line import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    code = main(["report", "--json"])
there = {each["id"]: [each["status"], each["reason"]] for each in json.loads(out.getvalue())["results"]}
with contextlib.redirect_stdout(io.StringIO()) as out:
    main(["explain", "bitsandbytes-int8-copies"])
differ = {name: [here[name], there[name]] for name in here if here[name] != there[name]}
print(json.dumps([code, differ, "python -m patches adopt bitsandbytes-int8-copies" in " ".join(out.getvalue().split())]))
"""
    assert said(source) == [0, {}, True]


def test_threads_that_ask_at_once_get_the_same_answers(said):
    source = """
from patches.newer_releases import NewerReleases
from patches.engine.compiler import Compiler
newer = NewerReleases(Compiler().digests)
parts = [part for patch in patches.REGISTRY.patches.values() for part in patch.parts if part.package == "bitsandbytes"]
answers = [[], [], [], []]
start = threading.Barrier(len(answers))
def judge(found):
    start.wait()
    found.extend(newer.judge(part, part.package, "0.51.0") for part in parts)
threads = [threading.Thread(target=judge, args=(found,)) for found in answers]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps([len(answers[0]) > 20, all(found == answers[0] for found in answers)]))
"""
    assert said(source) == [True, True]
