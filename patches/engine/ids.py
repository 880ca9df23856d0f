"""Which patch an id means: its own, or one that it had in an earlier release."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from .patch import Part, Patch


class Ids:
    """The patches of a registry by each id that they have or had."""

    def __init__(self, patches: Iterable[Patch], note: Callable[[str], None]) -> None:
        """Take ``patches``; raise ``ValueError`` if two have one id. ``note`` is told of each former id that is used."""
        self.present: dict[str, Patch] = {}
        self._former: dict[str, str] = {}
        self._note = note
        for patch in patches:
            for known in (patch.id, *patch.former_ids):
                if known in self.present or known in self._former:
                    raise ValueError(f"two patches are named {known}")
                self._former[known] = patch.id
            self.present[patch.id] = patch
            del self._former[patch.id]

    def find(self, patch_id: str) -> str | None:
        """Return the present id of the patch that ``patch_id`` means; None if it means none."""
        if patch_id in self.present:
            return patch_id
        if (found := self._former.get(patch_id)) is not None:
            self._note(f"the patch {patch_id} is called {found} now; both ids are accepted")
        return found

    def choose(self, ids: tuple[str, ...]) -> list[Patch]:
        """Return the patches that ``ids`` mean, all without one, in the order of the registry.

        Raises
        ------
        TypeError
            One of them is no string.
        KeyError
            One means no patch; the message names the nearest.
        """
        chosen = set()
        for patch_id in ids:
            if not isinstance(patch_id, str):
                raise TypeError(f"expected ids of patches as strings, one per argument, got {patch_id!r}")
            if (found := self.find(patch_id)) is None:
                raise KeyError(unknown(patch_id, self.present))
            chosen.add(found)
        return [patch for patch in self.present.values() if not ids or patch.id in chosen]

    def keys(self, ids: tuple[str, ...] = ()) -> list[str]:
        """Return the keys of the parts of the patches that ``ids`` mean, of all without one."""
        return [part.key for patch in self.choose(ids) for part in patch.parts]

    def part(self, key: str) -> Part:
        """Return the part with ``key``."""
        return next(part for part in self.present[patch_id_of(key)].parts if part.key == key)


def patch_id_of(key: str) -> str:
    """Return the id of the patch whose part has ``key``."""
    return key.partition(": ")[0]


def unknown(patch_id: str, known: Iterable[str], kind: str = "patch") -> str:
    """Make the message for an id, or another name of a ``kind``, that does not exist."""
    near = difflib.get_close_matches(str(patch_id), list(known), n=3, cutoff=0.4)
    hint = f"the nearest: {', '.join(near)}" if near else "`python -m patches list` shows all"
    return f"no {kind} is named {patch_id!r}; {hint}"
