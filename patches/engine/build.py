"""What edits make of originals: the very object that they made before, if they did."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from .compiler import Compiler
from .edits import Edit
from .state import Installed


class Builder:
    """Makes each value once in a process. ``compiler`` makes the code, and may have it from an earlier one."""

    def __init__(self, compiler: Compiler | None = None) -> None:
        self.compiler = compiler or Compiler()
        self._built: dict[Hashable, tuple[Any, ...]] = {}

    def with_edits(self, known: Installed, edits: tuple[tuple[str, Edit], ...]) -> Installed:
        """``known`` with ``edits`` in it, no others. May raise ``Conflict``, and what the edits' own functions raise."""
        slot, original = known.slot, known.original
        key = (slot.key, id(original), *(id(edit) for _, edit in edits))
        found = self._built.get(key)
        if found is None:
            value = slot.build(original, [edit for _, edit in edits], self.compiler)
            # With all that its key names, so that no other object can have one of these addresses.
            found = self._built[key] = (value, slot, original, edits)
        return Installed(slot, original, edits, found[0])
