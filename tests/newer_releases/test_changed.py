"""What a newer release has changed leaves out just the patches that rest on it; other changes leave out none."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from patches import REGISTRY
from patches.newer_releases.source_table import _shipped
from tests.newer_releases import copies, programs
from tools.sources.gathered import edited

pytestmark = copies.NEEDS_NEWEST
NUMBER = copies.NUMBERS["bitsandbytes"]
PARTS = {part.key: part for patch in REGISTRY.patches.values() for part in patch.parts}
EDITED = "bitsandbytes.nn.modules:Linear4bit.forward"
"""Edited by patches."""
CALLED = "bitsandbytes.functional:int8_vectorwise_quant"
"""Called by the code of a patch, edited by none."""
CHANGES = {
    "nn/modules.py": copies.replace("quant_state = self.weight.quant_state", "quant_state = (self.weight).quant_state or None"),
    "functional.py": copies.replace("int8_vectorwise_quant.default(A, threshold)", "int8_vectorwise_quant.default(A, float(threshold))"),
}  # fmt: skip


def resting_on(*names: str) -> set[str]:
    """Keys of the parts of bitsandbytes that rest on one of ``names``."""
    rows = _shipped()["rests_on"]
    return {key for key, part in PARTS.items() if part.package == "bitsandbytes"
            and not {*rows[key], *edited(part)}.isdisjoint(names)}  # fmt: skip


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> set[str]:
    """Keys of what is applied on an unchanged copy."""
    folder = tmp_path_factory.mktemp("unchanged")
    copies.copy(folder, "bitsandbytes", NUMBER)
    return {key for key, (status, _) in programs.verdicts(folder).items() if status == "available"}


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("changed")
    copies.copy(folder, "bitsandbytes", NUMBER, CHANGES)
    return folder


def test_just_the_patches_that_rest_on_a_changed_function_are_left_out(changed, known):
    found = programs.verdicts(changed)
    left_out = {key for key, (status, _) in found.items() if status == "untested"}
    assert left_out == resting_on(EDITED, CALLED) & known
    assert known - left_out == {key for key, (status, _) in found.items() if status == "available"}


def test_the_reason_names_function_and_module_and_the_command(changed):
    found = programs.verdicts(changed)
    name = next(key for key in resting_on(EDITED) if found[key][0] == "untested")
    for key, target in ((name, EDITED), ("bitsandbytes-int8-copies", CALLED)):
        module, function = target.split(":")
        assert found[key][1].startswith(
            f"bitsandbytes {NUMBER} is newer than 0.50.2; {function} of {module} is not that of 0.50"
        )
        assert found[key][1].endswith(f"; to try it on this machine: python -m patches adopt {key.partition(':')[0]}")


def test_a_function_that_only_our_own_code_calls_is_no_target_of_an_edit():
    assert not [key for key, part in PARTS.items() if CALLED in edited(part)]
    assert "bitsandbytes-int8-copies" in resting_on(CALLED)


def test_a_program_gets_one_line_and_the_others_are_applied(changed, known, forked, repaired):
    """A program that had transformers before, and imports bitsandbytes."""
    source = programs.reported("import bitsandbytes, bitsandbytes.optim, peft", said="str(report)")
    answer = forked(source, **programs.environment(changed, {**repaired, "COLUMNS": "300"}))
    found = programs.Said(*json.loads(answer.splitlines()[-1]))
    left_out = {key.partition(":")[0] for key in resting_on(EDITED, CALLED) & known}
    assert found.ids("untested") == left_out
    assert len(found.ids("applied")) > 40
    assert found.warnings == [
        "not applied, because the source that they rest on has changed in this release: "
        f"{len(left_out)} patches of bitsandbytes {NUMBER}. To verify them on this machine: python -m patches adopt"
    ]
    assert all(f"untested       {name}\n    bitsandbytes {NUMBER} is newer than" in found.said for name in left_out)


def commented(text: str) -> str:
    return text.replace("\n\n\n", "\n\n\n# a comment\n")


def reformatted(text: str) -> str:
    """Without comments, in other lines, in other quotes."""
    return "# made by a tool\n\n\n\n" + ast.unparse(ast.parse(text))


def documented(text: str) -> str:
    """With another docstring for each function and class that has one."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body[0] = ast.Expr(ast.Constant("Another text."))
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.mark.parametrize("change", [commented, reformatted, documented, lambda text: text.replace("\n", "\r\n")],
                         ids=["comments", "formatting", "docstrings", "line ends"])  # fmt: skip
def test_what_is_no_code_leaves_out_nothing(change: Callable[[str], str], known, tmp_path):
    files = {
        f"{name}.py": change for name in ("nn/modules", "functional", "autograd/_functions", "optim/optimizer", "utils")
    }
    copies.copy(tmp_path, "bitsandbytes", NUMBER, files)
    found = programs.verdicts(tmp_path)
    assert {key for key, (status, _) in found.items() if status == "available"} == known


def test_what_nothing_rests_on_may_change(known, tmp_path):
    """New functions and classes, a new method, a changed function that no patch names."""
    change = {
        "functional.py": lambda text: text + "\n\ndef quantize_6bit(A):\n    return A\n",
        "utils.py": copies.replace("def replace_linear(", "def replace_all(): ...\n\n\ndef replace_linear(anything, "),
        "nn/modules.py": copies.replace("    def set_compute_type(", "    def a_new_one(self): ...\n\n    def set_compute_type("),
    }  # fmt: skip
    copies.copy(tmp_path, "bitsandbytes", NUMBER, change)
    found = programs.verdicts(tmp_path)
    assert {key for key, (status, _) in found.items() if status == "available"} == known


def test_an_old_number_is_applied_whatever_its_source_is(tmp_path):
    """As it always was: the match of each edit decides there."""
    copies.copy(tmp_path, "bitsandbytes", "0.50.1", CHANGES)
    assert not [key for key, (status, _) in programs.verdicts(tmp_path, **os.environ).items() if status == "untested"]
