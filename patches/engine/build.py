"""What edits make of originals: the very object that they made before, if they did."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from types import CodeType, FunctionType
from typing import Any
from weakref import ref

from .compiler import Compiler
from .edits import Edit, SetAttribute
from .state import Installed, State


class Builder:
    """Makes no value anew while the one it made is alive; keeps none alive itself.

    ``compiler`` makes the code, and may have it from an earlier process.
    """

    def __init__(self, compiler: Compiler | None = None) -> None:
        self.compiler = compiler or Compiler()
        self._built: dict[Hashable, tuple[ref[Any], Any]] = {}

    def with_edits(self, known: Installed, edits: tuple[tuple[str, Edit], ...], state: State) -> Installed:
        """Make ``known`` anew with ``edits`` alone in it. May raise ``Conflict``, and any error of the edits' own functions."""
        slot, original = known.slot, known.original
        key = (slot.key, id(original), *(id(edit) for _, edit in edits))
        found = self._built.get(key)
        value = found[0]() if found is not None and found[1][0].alive else None
        if value is None:
            value = slot.build(original, [edit for _, edit in edits], self.compiler, state)
            if isinstance(value, CodeType) or isinstance(value, FunctionType) and _is_made(edits):
                # With all that its key names, so that no other object can have one of these addresses.
                gone = partial(dict.pop, self._built, key)  # in C: what a signal raises in a callback is lost
                self._built[key] = (ref(value, gone), (slot, original, edits))
        return Installed(slot, original, edits, value)


def _is_made(edits: tuple[tuple[str, Edit], ...]) -> bool:
    """Tell whether an edit makes the value: a value that it names lives as long as the edit."""
    return any(isinstance(edit, SetAttribute) and edit.make is not None for _, edit in edits)
