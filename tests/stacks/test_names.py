"""No name of torch that a stack of the table lacks; `make stacks` asks the same on each."""

from __future__ import annotations

import ast

import pytest

from tests.stacks import names

pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")


def test_the_installed_torch_has_every_name():
    assert names.missing() == {}


@pytest.mark.parametrize(
    "source",
    ["torch._C._autograd._no_such_call()", "hooks = torch._C._autograd\nhooks._no_such_call()",
     "from torch._C._autograd import _no_such_call"],
)  # fmt: skip
def test_one_that_is_not_there_is_seen(source):
    wanted = names.named(ast.parse(source))
    assert "torch._C._autograd._no_such_call" in wanted
    assert not all(map(names.is_there, wanted))


def test_what_is_asked_for_with_getattr_is_not_counted():
    assert names.named(ast.parse("getattr(torch._C, '_no_such_call', None)")) == {"torch._C"}
