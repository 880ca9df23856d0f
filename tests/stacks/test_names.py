"""No name of torch that a stack of the table lacks; `make stacks` asks the same on each."""

from __future__ import annotations

import ast
import json
from dataclasses import replace

import pytest
from packaging.version import Version

import patches
from patches.engine.edits import Rewrite
from tests.stacks import names
from tools import stacks as tool

pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")


def test_the_installed_torch_has_every_name():
    assert names.missing() == {}


@pytest.mark.parametrize(
    "source",
    ["torch._C._autograd._no_such_call()", "hooks = torch._C._autograd\nhooks._no_such_call()",
     "from torch._C._autograd import _no_such_call", "from torch._C import _autograd as hooks\nhooks._no_such_call()",
     "import torch._C._autograd as hooks\nhooks._no_such_call()"],
)  # fmt: skip
def test_one_that_is_not_there_is_seen(source):
    wanted = names.named(ast.parse(source))
    assert "torch._C._autograd._no_such_call" in wanted
    assert not all(map(names.is_there, wanted))


def test_code_that_is_written_into_others_is_walked(monkeypatch):
    patch = patches.REGISTRY.patches["torch-broadcast-unknown-keys"]
    edit = next(edit for edit in patch.edits if isinstance(edit, Rewrite) and not edit.when)
    bad = replace(patch, edits=(edit._replace(replace="torch._C._no_such_call()"),))
    monkeypatch.setattr(patches.REGISTRY, "patches", {**patches.REGISTRY.patches, patch.id: bad})
    assert names.missing() == {"torch._C._no_such_call": [patch.id]}


_STRATEGY = "torch._C._dynamo.eval_frame."
ASKED_SINCE = {
    (f"{_STRATEGY}{name}", "process/tracing.py"): "2.13"
    for name in ("_FrameAction", "_FrameAction.SKIP", "_FrameExecStrategy", "set_code_exec_strategy")
}
"""The names that a file uses from a release of torch on, for which it asks first."""


def test_no_torch_of_the_table_lacked_a_name():
    known = json.loads(tool.RESULTS.read_text("utf-8"))
    lacking = {
        (stack, torch, name, file)
        for stack, runs in known.items() for torch, run in runs.items()
        for name, files in run["names"].items() for file in files
        if Version(torch) >= Version(ASKED_SINCE.get((name, file), "0"))
    }  # fmt: skip
    assert lacking == set(), "make stacks measured it"


def test_what_is_asked_for_with_getattr_is_not_counted():
    assert names.named(ast.parse("getattr(torch._C, '_no_such_call', None)")) == {"torch._C"}
