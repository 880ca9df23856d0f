"""Applying, reverting and reporting: which patches, in which order, all or nothing."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..repairs.helpers import live_objects
from . import gate, imports
from .edits import Edit, module_of
from .locate import Conflict, Replaced
from .patch import Patch
from .report import Change, Report, Result, Status
from .slots import Slot, slots_of


class PatchError(RuntimeError):
    """With ``strict``: a patch met a conflict or failed. Its changes were undone."""


@dataclass
class _Installed:
    """What stands in a slot: the original, the active edits in order, and what they made."""

    slot: Slot
    original: Any
    edits: list[tuple[str, Edit]]
    value: Any

    @property
    def shadowed(self) -> bool:
        return self.slot.read() is not self.value


@dataclass
class _Memory:
    """What cannot be read from the process: why a patch is not in it."""

    status: Status
    reason: str
    notes: tuple[str, ...] = field(default=())


class Registry:
    """All patches, and what they have changed in this process."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self.patches: dict[str, Patch] = {}
        for patch in patches:
            if patch.id in self.patches:
                raise ValueError(f"two patches are named {patch.id}")
            self.patches[patch.id] = patch
        self.disabled: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._slots: dict[Hashable, _Installed] = {}
        self._memory: dict[str, _Memory] = {}
        self._pending: dict[str, bool] = {}  # id -> untested; to apply when their modules arrive
        self._hooked: set[str] = set()
        self._arrived: set[str] = set()  # modules just imported, to be looked at
        self._notes: list[str] = []
        self.on_change: Callable[[Report], None] | None = None
        """Called with the patches that an import has just brought to an end state."""

    # -- the three verbs -----------------------------------------------------------------------

    def apply(self, *ids: str, strict: bool = False, untested: bool = False) -> Report:
        """Apply the named patches, or all; those whose modules are not imported yet follow later.

        Idempotent. Each patch is applied whole or not at all.

        Raises
        ------
        KeyError
            An id is unknown; the message names the nearest. Nothing was changed.
        PatchError
            With ``strict``, after all were tried: a patch met a conflict or failed.
        """
        chosen = self._chosen(ids)
        with self._lock:
            for patch in chosen:
                self._memory.pop(patch.id, None)
            self._apply(chosen, untested)
        self._catch_up()
        report = self.report(*ids)
        if strict and (bad := report.with_status(Status.CONFLICT, Status.FAILED)):
            raise PatchError("; ".join(f"{r.id}: {r.status}: {r.reason}" for r in bad))
        return report

    def revert(self, *ids: str) -> Report:
        """Take out the named patches, or all, newest first; what they changed is put back as it was.

        What someone else changed after us is left as they made it and reported as ``SHADOWED``.
        """
        chosen = self._chosen(ids)
        with self._lock:
            changed = False
            for patch in reversed(chosen):
                self._pending.pop(patch.id, None)
                changed |= self._take_out(patch)
            if changed:
                self._reset_compiler()
        self._catch_up()
        return self.report(*ids)

    def report(self, *ids: str) -> Report:
        """The state of the named patches, or of all, read from what is installed now."""
        return Report(tuple(self._result(patch) for patch in self._chosen(ids)), tuple(self._notes))

    @contextlib.contextmanager
    def applied(self, *ids: str, strict: bool = True, untested: bool = False) -> Iterator[Report]:
        """Context manager and decorator: applied inside; what was applied before stays applied.

        Raises ``PatchError`` on entry, unless ``strict`` is false, if one cannot be applied.
        """
        before = {p.id for p in self._chosen(ids) if self._active(p) or p.id in self._pending}
        fresh = [p.id for p in self._chosen(ids) if p.id not in before]
        try:
            self.apply(*ids, strict=strict, untested=untested)
            yield self.report(*ids)
        finally:
            if fresh:
                self.revert(*fresh)

    # -- applying ------------------------------------------------------------------------------

    def _apply(self, chosen: list[Patch], untested: bool, fresh: frozenset[str] = frozenset()) -> None:
        """``fresh``: packages whose import has just ended, so that nothing of theirs is alive yet."""
        with live_objects.one_walk():
            changed = self._apply_each(chosen, untested, fresh)
        if changed:
            self._reset_compiler()

    def _apply_each(self, chosen: list[Patch], untested: bool, fresh: frozenset[str]) -> bool:
        changed = False
        for patch in chosen:
            if patch.id in self.disabled or self._active(patch):
                continue
            if gate.check(patch, untested=untested).status is not Status.AVAILABLE:
                continue
            if missing := self._missing(patch):
                self._pending[patch.id] = untested
                for name in missing - self._hooked:
                    self._hooked.add(name)
                    imports.after_import(name, partial(self._module_arrived, name))
                continue
            self._pending.pop(patch.id, None)
            changed |= self._put_in(patch, look_for_damage=patch.package not in fresh)
        return changed

    def _put_in(self, patch: Patch, look_for_damage: bool) -> bool:
        """Apply one patch whole. Returns whether anything was changed."""
        try:
            planned = self._plan(patch)
        except Conflict as conflict:
            theirs = isinstance(conflict, Replaced)
            status = Status.SHADOWED if theirs else Status.CONFLICT
            self._memory[patch.id] = _Memory(status, f"{conflict}; left as it is" if theirs else str(conflict))
            return False
        except Exception as error:
            self._memory[patch.id] = _Memory(Status.FAILED, f"{type(error).__name__}: {error}")
            return False
        written: list[tuple[Slot, Any]] = []
        try:
            for new in planned:
                before = new.slot.read()
                written.append((new.slot, before))
                new.slot.write(new.value)
        except Exception as error:
            for slot, before in reversed(written):
                with contextlib.suppress(Exception):
                    slot.write(before)
            reason = f"{type(error).__name__}: {error}; every change was undone"
            self._memory[patch.id] = _Memory(Status.FAILED, reason)
            return True
        for new in planned:
            self._slots[new.slot.key] = new
        notes = self._damage(patch) if look_for_damage else ()
        self._memory[patch.id] = _Memory(Status.APPLIED, "", notes)
        return True

    def _plan(self, patch: Patch) -> list[_Installed]:
        """Everything that ``patch`` will write, built but not written."""
        grouped: dict[Hashable, tuple[Slot, list[Edit]]] = {}
        for edit in self._edits(patch):
            for slot, change in slots_of(edit):
                grouped.setdefault(slot.key, (slot, []))[1].append(change)
        if not grouped:
            raise Conflict("it has no edit for this release")
        planned = []
        for key, (slot, edits) in grouped.items():
            known = self._slots.get(key)
            if known is not None and known.shadowed:
                raise Conflict(f"{slot.name}: someone else changed it after us")
            original = slot.read() if known is None else known.original
            active = [*(known.edits if known else ()), *((patch.id, edit) for edit in edits)]
            active.sort(key=lambda entry: self._order(entry[0]))
            value = slot.build(original, [edit for _, edit in active])
            planned.append(_Installed(slot, original, active, value))
        return planned

    def _damage(self, patch: Patch) -> tuple[str, ...]:
        if patch.damage is None:
            return ()
        try:
            return tuple(patch.damage())
        except Exception as error:
            return (f"looking for what was damaged before failed: {type(error).__name__}: {error}",)

    # -- reverting -----------------------------------------------------------------------------

    def _take_out(self, patch: Patch) -> bool:
        """Revert one patch. Returns whether anything was changed."""
        changed = False
        problems = []
        for key, known in reversed(list(self._slots.items())):
            rest = [(owner, edit) for owner, edit in known.edits if owner != patch.id]
            if len(rest) == len(known.edits):
                continue
            if known.shadowed:
                problems.append(f"{known.slot.name} was changed by someone else after us; left as it is")
                continue
            try:
                value = known.slot.build(known.original, [e for _, e in rest]) if rest else known.original
                known.slot.write(value)
            except Exception as error:  # one slot must not keep the others from being put back
                problems.append(f"{known.slot.name}: {type(error).__name__}: {error}")
                continue
            changed = True
            if rest:
                known.edits, known.value = rest, value
            else:
                del self._slots[key]
        if problems:
            self._memory[patch.id] = _Memory(Status.SHADOWED, "; ".join(problems))
        elif changed:
            self._memory[patch.id] = _Memory(Status.REVERTED, "")
        return changed

    # -- what an import brings -----------------------------------------------------------------

    def _module_arrived(self, name: str) -> None:
        """An awaited module is imported. Never waits: the importing thread holds import locks."""
        self._arrived.add(name)
        self._catch_up()

    def _catch_up(self) -> None:
        """Apply what became possible, unless a thread is at work; then it does so when it ends."""
        while self._arrived and self._lock.acquire(blocking=False):
            try:
                fresh = frozenset(name.partition(".")[0] for name in self._arrived)
                self._arrived.clear()
                ready = {i: u for i, u in self._pending.items() if not self._missing(self.patches[i])}
                for untested in set(ready.values()):
                    chosen = [p for i, p in self.patches.items() if ready.get(i) is untested]
                    self._apply(chosen, untested, fresh)
            finally:
                self._lock.release()
            if ready and self.on_change is not None:
                self.on_change(self.report(*ready))

    def _reset_compiler(self) -> None:
        """Forget compiled code: Dynamo does not guard on the code of methods of ``nn.Module``."""
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None or getattr(dynamo.__spec__, "_initializing", False):
            return
        import torch

        if torch._guards.CompileContext.current_compile_id() is not None:
            return  # an import inside a region that is being traced brought us here
        used = any(torch._dynamo.utils.counters.values())
        torch.compiler.reset()
        note = "torch.compiler.reset() was called: compiled code is compiled again at its next use"
        if used and note not in self._notes:
            self._notes.append(note)

    # -- reading the state ---------------------------------------------------------------------

    def _result(self, patch: Patch) -> Result:
        verdict = gate.check(patch)
        memory = self._memory.get(patch.id)
        active = self._active(patch)
        status, reason, notes = verdict.status, verdict.reason, ()
        if active:
            lost = [f"{known.slot.name} was changed by someone else after us" for known in active if known.shadowed]
            lost += filter(None, (known.slot.displaced() for known in active))
            status, reason = Status.SHADOWED if lost else Status.APPLIED, "; ".join(lost)
            notes = memory.notes if memory else ()
        elif patch.id in self.disabled:
            status, reason = Status.DISABLED, "PATCHES_DISABLE names it"
        elif memory is not None and memory.status is not Status.APPLIED:
            status, reason = memory.status, memory.reason
        elif status is Status.AVAILABLE and (missing := self._missing(patch)):
            status = Status.PENDING
            follows = "is applied when it is" if patch.id in self._pending else "apply() then follows its import"
            reason = f"{', '.join(sorted(missing))} is not imported yet; {follows}"
        return Result(
            patch.id, patch.summary, status, reason, verdict.versions, self._changes(patch), notes, patch.links
        )

    def _changes(self, patch: Patch) -> tuple[Change, ...]:
        changes = []
        for known in self._active(patch):
            mine = [edit for owner, edit in known.edits if owner == patch.id]
            if known.value is not known.original:  # else it was there already, or absent already
                changes.append(Change(known.slot.name, partial(_diff, known.slot, known.original, mine)))
        return tuple(changes)

    def _active(self, patch: Patch) -> list[_Installed]:
        """The slots in which ``patch`` has an edit."""
        return [k for k in list(self._slots.values()) if any(owner == patch.id for owner, _ in k.edits)]

    def _edits(self, patch: Patch) -> list[Edit]:
        return [edit for edit in patch.edits if not edit.when or gate.satisfied(edit.when)]

    def import_targets(self, patch: Patch) -> None:
        """Import what ``patch`` edits here; what cannot be imported stays missing."""
        for name in sorted(set(map(module_of, self._edits(patch)))):
            with contextlib.suppress(ImportError, NotImplementedError):  # the latter from unsloth without a GPU
                importlib.import_module(name)

    def _missing(self, patch: Patch) -> set[str]:
        """Modules that ``patch`` edits and that are not imported whole."""
        return {name for name in map(module_of, self._edits(patch)) if not imports.imported(name)}

    def _order(self, patch_id: str) -> int:
        return list(self.patches).index(patch_id)

    def _chosen(self, ids: tuple[str, ...]) -> list[Patch]:
        for patch_id in ids:
            if patch_id not in self.patches:
                raise KeyError(unknown(patch_id, self.patches))
        return [patch for patch in self.patches.values() if not ids or patch.id in ids]


def _diff(slot: Slot, original: Any, edits: list[Edit]) -> str:
    """What ``edits`` alone make of ``original``."""
    try:
        return slot.diff(original, edits, slot.build(original, edits))
    except Conflict as conflict:
        return f"# {conflict}\n"


def unknown(patch_id: str, known: Iterable[str]) -> str:
    """The message for an id that does not exist."""
    near = difflib.get_close_matches(str(patch_id), list(known), n=3, cutoff=0.4)
    hint = f"the nearest: {', '.join(near)}" if near else "`python -m patches list` shows all"
    return f"no patch is named {patch_id!r}; {hint}"
