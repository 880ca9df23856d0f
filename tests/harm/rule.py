"""The rule: what a program may do with patches, given what it did without.

A program shows its checks one after the other and may end in an error, so the rule is applied check by check:

=============== =======================================================
unpatched       allowed patched
=============== =======================================================
right           right, the same bits where the path was healthy
wrong, silently right, or a clear error
an error        right, or an error at least as clear; no wrong number
=============== =======================================================

One patch alone need not repair what it is not about: there, what was wrong may stay wrong.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from .checks import Check, equal

CLEAR = (RuntimeError, ValueError, TypeError, pickle.PickleError, OSError)
"""What a user can be told by. Not so ``AssertionError``, ``KeyError``, ``AttributeError``, ``NameError`` and
``IndexError``, which tell where the code gave up."""


@dataclass(frozen=True)
class Raised:
    """An error that ended a program."""

    kind: type[BaseException]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        return cls(type(error), str(error))

    def __str__(self) -> str:
        return f"{self.kind.__name__}: {' '.join(self.message.split())[:160]}"

    @property
    def clear(self) -> bool:
        """Whether the error tells a user something: of a kind that is meant to, with a message."""
        meant = issubclass(self.kind, CLEAR) or self.kind is Exception  # bitsandbytes raises the latter, with words
        return meant and bool(self.message.strip())

    def at_least_as_clear_as(self, before: Raised) -> bool:
        """Clear, or the same kind of error as before, and not without the message that it had."""
        return self.clear or (issubclass(self.kind, before.kind) and bool(self.message or not before.message))


class Died(BaseException):
    """The program took its process with it. Never clear."""


@dataclass(frozen=True)
class Trace:
    """What a program did: its checks in order, and the error that ended it, if one did."""

    checks: tuple[Check, ...]
    error: Raised | None = None

    def __str__(self) -> str:
        shown = [f"{'right' if c.right else 'wrong'} ({c.figure})" for c in self.checks]
        return ", ".join([*shown, *([str(self.error)] if self.error else [])]) or "nothing shown"


def fault(unpatched: Trace, patched: Trace, alone: bool = False) -> str:
    """Why ``patched`` breaks the rule, given ``unpatched``; empty if it does not.

    Parameters
    ----------
    alone:
        Not all patches were in: what was wrong may stay wrong.
    """
    for number, after in enumerate(patched.checks):
        if number < len(unpatched.checks):
            found = _of_check(unpatched.checks[number], after, alone)
        elif unpatched.error is None:
            found = "shows more than it does unpatched: a program must not depend on the patches"
        else:
            found = "" if after.right else f"an error ({unpatched.error}) became a wrong number"
        if found:
            return f"check {number + 1}: {found} ({after.figure})"
    return _of_end(unpatched, patched)


def _of_check(before: Check, after: Check, alone: bool) -> str:
    """The first two rows of the table, where the patched program went on."""
    if before.right and not after.right:
        return "right became wrong"
    if not before.right and not after.right and not alone:
        return "wrong stays wrong"
    healthy = before.right and not (before.rounding or after.rounding)
    return "right became other bits" if healthy and not equal(before.value, after.value) else ""


def _of_end(unpatched: Trace, patched: Trace) -> str:
    """The last column of the table, where the patched program ended."""
    end = len(patched.checks)
    if patched.error is None:
        return "" if end >= len(unpatched.checks) else "shows less than it does unpatched, without an error"
    place = f"after check {end}: "
    if end < len(unpatched.checks):
        if unpatched.checks[end].right:
            return f"{place}what was right raises {patched.error}"
        return "" if patched.error.clear else f"{place}what was wrong raises an unclear {patched.error}"
    if unpatched.error is None:
        return f"{place}what ended well raises {patched.error}"
    if not patched.error.at_least_as_clear_as(unpatched.error):
        return f"{place}the error {unpatched.error} became the less clear {patched.error}"
    return ""
