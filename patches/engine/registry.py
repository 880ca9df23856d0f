"""Applying, reverting and reporting: which patches, in which order, all or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from . import gate, needs, reading
from .build import Builder
from .edits import Edit
from .features import Features, put_in
from .ids import Ids, patch_id_of
from .libraries import IMPORTED, Libraries
from .patch import Feature, Part, Patch
from .plan import Draft, outcome_of
from .report import Report, Status
from .state import FollowUp, Outcome, State
from .transaction import Stale, StepFailed, Store


class PatchError(RuntimeError):
    """With ``strict``: a patch met a conflict or failed. Its changes were undone."""


class Registry:
    """All patches, and their changes in this process.

    Every verb plans from a snapshot of the state and commits in one step (:mod:`.transaction`). It takes no lock: it
    may run in any thread, in a signal handler or during an import, and it may be interrupted anywhere.
    """

    def __init__(
        self,
        patches: Iterable[Patch],
        forget_compiled: Callable[[], str | None] = lambda: "",
        damage_scan: Callable[[], AbstractContextManager[Any]] = nullcontext,
        builder: Builder | None = None,
        limits: gate.Limits = gate.NO_LIMITS,
        libraries: Libraries = IMPORTED,
    ) -> None:
        """Take all patches, the limits of :func:`.gate.check`, and the functions that depend on the libraries.

        ``forget_compiled`` is called after each change: compilers discard what they made of the old code. It returns a
        note for the report, often empty, or None if it has to be called again later. ``damage_scan`` makes one walk over
        live objects serve all calls of ``damage()`` inside; it may be nested, and is entered before objects change.
        """
        self.ids = Ids(patches, self.note)
        self.patches = self.ids.present
        self.limits, self.libraries = limits, libraries
        self.disabled: frozenset[str] = frozenset()
        self.on_change: Callable[[Report], None] | None = None
        """Called with the patches that an import, or :meth:`follow_imports`, has just brought to an end state."""
        self._forget_compiled = forget_compiled
        self._damage_scan = damage_scan
        self._store: Store[State] = Store(State(libraries=libraries))
        self._features = Features()
        self._builder = builder or Builder()
        self._hooked: set[str] = set()
        self._order = {key: i for i, key in enumerate(self.ids.keys())}

    edits = staticmethod(needs.edits)
    import_targets = staticmethod(needs.import_targets)

    def verdict(self, part: Part, *, untested: bool = False) -> gate.Verdict:
        """Say whether ``part`` is for the installed releases."""
        return gate.check(part, self.limits, untested=untested, libraries=self.libraries)

    def is_for(self, patch: Patch) -> bool:
        """Tell whether a part of ``patch`` is for the installed releases."""
        return any(self.verdict(part).status is Status.AVAILABLE for part in patch.parts)

    # -- the three verbs -----------------------------------------------------------------------

    def apply(self, *ids: str, strict: bool = False, untested: bool = False) -> Report:
        """Apply the named patches, or all; those whose modules are not imported yet follow later.

        Idempotent. Each patch is applied whole or not at all; interrupted, the call has done nothing or all. An id that
        is unknown is a ``KeyError``; with ``strict`` a conflict or failure is a ``PatchError``, after all were tried.
        """
        chosen = self.ids.keys(ids)
        active = self._store.read().active
        has_damage_check = any(self.ids.part(key).damage and key not in active for key in chosen)
        with self._damage_scan() if has_damage_check else nullcontext():
            self._put_in(chosen, untested)
        report = self.report(*ids)
        if strict and (bad := report.with_status(Status.CONFLICT, Status.FAILED)):
            raise PatchError("; ".join(f"{r.id}: {r.status}: {r.reason}" for r in bad))
        return report

    def revert(self, *ids: str) -> Report:
        """Revert the named patches, or all: the original objects are back. It needs no source of the libraries.

        A place that another program has changed since stays as it is, and the patch is reported as ``SHADOWED``. Without
        ids the call also reverts features (``compile_options``). An unknown id is a ``KeyError``, and changes nothing.
        """
        chosen = self.ids.keys(ids)
        self._change(partial(self._plan_revert, (*chosen, *(() if ids else self._features.ids()))))
        return self.report(*ids)

    def report(self, *ids: str) -> Report:
        """Return the state of the named patches, or of all, read from the process now. An unknown id is a ``KeyError``."""
        chosen = self.ids.choose(ids)
        self._sweep()
        state, off = self._store.read(), self.disabled
        results = tuple(reading.result(state, patch, self.verdict, disabled=patch.id in off) for patch in chosen)
        features = () if ids else tuple(reading.features(state, self._features))
        return Report(results, tuple(reading.notes(state, results)), features)

    @contextlib.contextmanager
    def applied(self, *ids: str, strict: bool = True, untested: bool = False) -> Iterator[Report]:
        """Apply the patches for a ``with`` block or a decorated function; patches that were applied before stay applied.

        Raises ``PatchError`` on entry, unless ``strict`` is false, if one cannot be applied.
        """
        state = self._store.read()
        before = {*state.active, *state.waiting}
        newly_applied = [p.id for p in self.ids.choose(ids) if not any(part.key in before for part in p.parts)]
        try:
            yield self.apply(*ids, strict=strict, untested=untested)
        finally:
            if newly_applied:
                self.revert(*newly_applied)

    def note(self, text: str) -> None:
        """Add a sentence to every report from now on."""
        self._commit(lambda draft: draft.note(text))

    def prepare(self) -> None:
        """Make the code that :meth:`apply` would put in now, and keep it for later processes; change nothing."""
        with contextlib.suppress(Stale):
            draft = Draft(self._store.read, self._order, self._builder, {})
            self._plan_apply(dict.fromkeys(self.ids.keys(), False), frozenset(), draft)
        self._builder.compiler.keep()

    # -- features: edits that are in while someone uses them -----------------------------------

    def hold(self, feature: Feature, user: object) -> None:
        """Put in the edits of ``feature`` until :meth:`release`, or until ``user`` is gone.

        Raises ``Conflict`` if they do not fit; then none is in.
        """
        self._features.add_user(feature, user)
        self._change(partial(put_in, feature))

    def release(self, feature: Feature, user: object) -> list[str]:
        """End the use of ``feature`` by ``user``; the last one takes the edits out. Returns why some had to stay."""
        self._features.remove_user(feature, user)
        kept = self._change(lambda draft: None)  # every change takes out the features that have no user
        return [outcome.reason for owner, outcome in kept.items() if owner == feature.id]

    def follow_imports(self, *, untested: bool = False) -> None:
        """Apply all patches as :meth:`apply` does; ``on_change`` is told what became of the parts that need not wait."""
        keys = self.ids.keys()
        self._put_in(keys, untested)
        self._notify(keys)

    # -- planning ------------------------------------------------------------------------------

    def _plan_apply(self, untested_by_key: Mapping[str, bool], just_imported: Collection[str], draft: Draft) -> None:
        """Plan to put in each part that fits here; the others wait for modules that are not imported.

        ``untested_by_key`` has the key of each part, and whether it may go in on a release that it was not tested on.
        """
        ready: dict[str, list[Edit]] = {}
        active = draft.before.active.keys()
        for key, untested in untested_by_key.items():
            part = self.ids.part(key)
            if key not in active:
                draft.outcomes.pop(key, None)
            if patch_id_of(key) in self.disabled:
                continue
            draft.waiting.pop(key, None)
            imported = needs.is_package_imported(part, self.libraries)
            status = self.verdict(part, untested=untested).status if imported else Status.PENDING
            if status is Status.AVAILABLE and not needs.modules_not_imported(part, self.libraries):
                ready[key] = needs.edits(part, self.libraries)
            elif status is not Status.UNTESTED and needs.modules_to_wait_for(part, self.libraries):
                draft.waiting[key] = untested
        changed, failed = draft.put_in(ready)
        for key in failed.keys() - active:
            draft.set_outcome(key, outcome_of(failed[key]))
        for key in changed:
            part = self.ids.part(key)
            draft.set_outcome(key, Outcome(Status.APPLIED))
            draft.add_follow_up(FollowUp("compiled"))
            if part.damage is not None and part.package not in just_imported:
                draft.add_follow_up(FollowUp("damage", key))

    def _plan_revert(self, owners: Collection[str], draft: Draft) -> None:
        changed, problems = draft.take_out(owners)
        for owner in owners:
            draft.waiting.pop(owner, None)
            if owner in problems or owner in changed:
                draft.set_outcome(owner, problems.get(owner, Outcome(Status.REVERTED)))
            else:
                draft.clear_failed_outcome(owner)
        if changed:
            draft.add_follow_up(FollowUp("compiled"))

    # -- changing ------------------------------------------------------------------------------

    def _put_in(self, keys: Collection[str], untested: bool) -> None:
        self._change(partial(self._plan_apply, dict.fromkeys(keys, untested), frozenset()))
        self._await_imports()
        if len(keys) >= len(self.ids.keys()):  # a few parts are usually a trial: their code is not kept
            self._builder.compiler.keep()

    def _change(self, plan: Callable[[Draft], None]) -> dict[str, Outcome]:
        """Plan and commit, see :meth:`_commit`; then do what the change leaves to be done."""
        try:
            kept = self._commit(plan)
            self._do_follow_ups()
            return kept
        finally:
            self._sweep()

    def _commit(self, plan: Callable[[Draft], None]) -> dict[str, Outcome]:
        """Plan and commit; plan again if another thread was faster, or without a slot that failed to be written twice.

        Returns the outcome of each feature that has no user any more and could not be taken out.
        """
        failed_once: set[Hashable] = set()
        refused: dict[Hashable, str] = {}
        while True:
            draft = Draft(self._store.read, self._order, self._builder, refused)
            try:
                plan(draft)
                unused = self._features.unused()
                kept = draft.take_out(unused)[1] if unused else {}
                self._store.commit(draft.before, draft.state(), draft.steps())
                return kept
            except Stale:
                continue
            except StepFailed as failed:
                key = failed.step.place.key
                if key in failed_once:
                    refused[key] = f"{type(failed.__cause__).__name__}: {failed.__cause__}"
                failed_once.add(key)

    def _do_follow_ups(self) -> None:
        """Do the follow-ups of earlier changes, each until it succeeds, also after an interrupt."""
        scans = [follow_up for follow_up in self._store.read().follow_ups if follow_up.kind == "damage"]
        if scans:
            with self._damage_scan():
                found = {scan: self.ids.part(scan.owner).damaged() for scan in scans}
            self._commit(partial(Draft.record_damage, found=found))
        if FollowUp("compiled") in self._store.read().follow_ups:
            self._commit(partial(Draft.record_compiled_discarded, said=self._discard_compiled()))

    def _sweep(self) -> None:
        """Take out the names that no living code uses; in a commit of its own, for the reverted code must be gone before."""
        if self._store.read().idle_names:
            self._commit(Draft.sweep)

    def _discard_compiled(self) -> str | None:
        try:
            return self._forget_compiled()
        except Exception as error:
            return f"compiled code of the old functions could not be discarded: {type(error).__name__}: {error}"

    # -- what an import brings -----------------------------------------------------------------

    def _await_imports(self) -> None:
        """Register :meth:`_on_import` for each module that a waiting part needs."""
        waiting = self._store.read().waiting
        awaited = {key: needs.modules_to_wait_for(self.ids.part(key), self.libraries) for key in waiting}
        for name in set().union(*awaited.values()) - self._hooked:
            self.libraries.after_import(name, partial(self._on_import, name))
            self._hooked.add(name)
        # Imported after the plan was made and before the hook was set: no hook will be called.
        if late := {key: waiting[key] for key, names in awaited.items() if not names}:
            self._change(partial(self._plan_apply, late, frozenset()))

    def _on_import(self, name: str) -> None:
        """Apply the patches that waited for module ``name``. Raise nothing into its import."""
        try:
            package, waiting = name.partition(".")[0], self._store.read().waiting
            ready = {key: value for key, value in waiting.items() if package in needs.packages(self.ids.part(key))}
            if ready:
                self._change(partial(self._plan_apply, ready, frozenset({package})))
            self._await_imports()
            self._notify(ready)
            self._builder.compiler.keep()
        except Exception as error:
            with contextlib.suppress(Exception):
                self.note(f"after the import of {name}: {type(error).__name__}: {error}")

    def _notify(self, keys: Iterable[str]) -> None:
        """Tell ``on_change`` what became of those parts of ``keys`` that wait for nothing."""
        state, off = self._store.read(), self.disabled
        finished = [key for key in keys if key not in state.waiting]
        if self.on_change is not None and finished:
            results = []
            for key in finished:
                patch, part = self.patches[patch_id_of(key)], self.ids.part(key)
                results.append(reading.part_result(state, patch, part, self.verdict(part), disabled=patch.id in off))
            self.on_change(Report(tuple(results), state.notes))
