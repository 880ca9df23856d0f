"""The judge can fail: every cell of its table, from outcomes made up for it."""

from __future__ import annotations

import pytest
import torch

from .checks import Check, close, same
from .rule import Died, Raised, Trace, fault

RIGHT, OTHER_BITS, WRONG = Check(True, "right", 1), Check(True, "right", 2), Check(False, "wrong", 3)
ROUNDED = Check(True, "right", 2, rounding="another kernel")
CLEAR = Raised(RuntimeError, "the layer has lost its scales: load it again")
BARE = Raised(AssertionError, "")
KEY = Raised(KeyError, "'absmax'")


def trace(*checks: Check, error: Raised | None = None) -> Trace:
    return Trace(checks, error)


ALLOWED = {
    "right stays right": (trace(RIGHT), trace(RIGHT)),
    "right, other bits, and the program says why": (trace(RIGHT), trace(ROUNDED)),
    "wrong becomes right": (trace(WRONG), trace(RIGHT)),
    "wrong becomes a clear error": (trace(WRONG, RIGHT), trace(error=CLEAR)),
    "an error becomes right": (trace(error=BARE), trace(RIGHT)),
    "an error becomes a clear one": (trace(error=BARE), trace(error=CLEAR)),
    "an error stays": (trace(RIGHT, error=KEY), trace(RIGHT, error=KEY)),
    "an error comes later, after what is right": (trace(RIGHT, error=KEY), trace(RIGHT, RIGHT, error=CLEAR)),
    "a dead process becomes an error": (trace(error=Raised(Died, "signal 8")), trace(error=CLEAR)),
}

HARM = {
    "right becomes wrong": (trace(RIGHT), trace(WRONG)),
    "right becomes other bits": (trace(RIGHT), trace(OTHER_BITS)),
    "right becomes an error, however clear": (trace(RIGHT), trace(error=CLEAR)),
    "the end becomes an error": (trace(RIGHT), trace(RIGHT, error=CLEAR)),
    "the second of two becomes wrong": (trace(RIGHT, RIGHT), trace(RIGHT, WRONG)),
    "wrong stays wrong": (trace(WRONG), trace(WRONG)),
    "wrong becomes an unclear error": (trace(WRONG), trace(error=BARE)),
    "an error becomes a wrong number": (trace(error=CLEAR), trace(WRONG)),
    "an error becomes a wrong number after a right one": (trace(RIGHT, error=KEY), trace(RIGHT, RIGHT, WRONG)),
    "an error becomes less clear": (trace(error=CLEAR), trace(error=BARE)),
    "an error loses its message": (trace(error=KEY), trace(error=Raised(KeyError, ""))),
    "an error becomes a dead process": (trace(error=CLEAR), trace(error=Raised(Died, "signal 11"))),
    "fewer checks and no error": (trace(RIGHT, RIGHT), trace(RIGHT)),
    "more checks": (trace(RIGHT), trace(RIGHT, RIGHT)),
}


@pytest.mark.parametrize("unpatched, patched", ALLOWED.values(), ids=ALLOWED)
def test_allowed(unpatched: Trace, patched: Trace) -> None:
    assert fault(unpatched, patched) == ""
    assert fault(unpatched, patched, alone=True) == ""


@pytest.mark.parametrize("unpatched, patched", HARM.values(), ids=HARM)
def test_harm(unpatched: Trace, patched: Trace) -> None:
    assert fault(unpatched, patched)


def test_one_patch_alone_may_leave_wrong_what_was_wrong_and_nothing_else() -> None:
    found = {name for name, (before, after) in HARM.items() if not fault(before, after, alone=True)}
    assert found == {"wrong stays wrong"}


def test_close_asks_for_shape_size_and_numbers() -> None:
    one = torch.ones(2, 3)
    assert close(one + 1e-4, one, 1e-3).right
    assert not close(one + 1e-2, one, 1e-3).right
    assert not close(one[:, :2], one, 1e3).right
    assert not close(torch.full_like(one, torch.nan), one, 1e3).right
    assert not close(torch.full_like(one, torch.inf), one, 1e3).right
    assert close(torch.empty(0, 3), torch.empty(0, 3), 0).right


def test_same_asks_for_dtype_and_bits() -> None:
    one = torch.ones(2)
    assert same(one, one.clone()).right and same("a", "a").right
    assert not same(one.half(), one).right and not same(one + 1e-7, one).right and not same("a", "b").right


def test_a_result_is_kept_as_it_was() -> None:
    result = torch.ones(2)
    check = close(result, torch.ones(2), 0)
    result.zero_()
    assert torch.equal(check.value, torch.ones(2))
