"""The one place that writes to other packages: all of a change at once, or nothing of it.

A verb plans without writing: from the state that it read it makes the next one, and a list of steps that put
places in other packages where that state says they are. :meth:`Store.commit` takes those steps and swaps the
state in *one call into C*: no bytecode runs between two of them, so no signal (Ctrl-C), no other thread and no
fork can come between. An interrupt at any point therefore finds the process as it was before or as it is after,
and the state always tells the truth. (That is so under the GIL; a build of Python without one is not supported by
the packages that are repaired.) There is no lock: a plan from a state that is no longer the
current one is told so and plans again. So nothing can deadlock, in a signal handler, in an import that a verb
triggers, or in a forked child.

A step may still fail by itself (a metaclass that forbids it, an audit hook that raises). Then the steps before
it are undone, the same way.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

State = TypeVar("State")
_call = partial.__call__


class Stale(Exception):
    """Someone else has changed the state since it was read. Nothing was written."""


class StepFailed(Exception):
    """A step raised, the cause of this error. What had been written was put back."""

    def __init__(self, step: Step) -> None:
        super().__init__(step.place)
        self.step = step


class Step(NamedTuple):
    """One write: what does it, what undoes it, each a :class:`functools.partial` of a C function."""

    place: Any
    """Tells the planner which of its steps failed."""
    do: partial[Any]
    undo: partial[Any]


class Store(Generic[State]):
    """Holds the state. Reading it never waits; changing it is :meth:`commit` alone."""

    def __init__(self, state: State) -> None:
        self._holder = [state]
        self._journals: list[_Journal] = []

    def read(self) -> State:
        """Return the current state; first undo the rest of a change whose undoing was interrupted."""
        if self._journals:
            others = sys._current_frames().keys() - {threading.get_ident()}
            for journal in [j for j in self._journals if j.thread not in others]:
                self._close(journal)
        return self._holder[0]

    def commit(self, old: State, new: State, steps: Sequence[Step] = ()) -> None:
        """Take all ``steps`` and make ``new`` the state, if ``old`` still is.

        Raises
        ------
        Stale
            It is not.
        StepFailed
            A step raised an ``Exception``. Any other error in a step (an interrupt) is raised as it is. Either
            way the steps before it were undone.
        """
        holder = self._holder
        journal = _Journal(
            (
                partial(holder.index, old),  # ValueError if it is not there: compares by identity, in C
                *(step.do for step in steps),
                partial(holder.__setitem__, 0, new),
            ),
            steps,
        )
        self._journals.append(journal)
        try:
            journal.run()
        except ValueError as error:
            if journal.begun:
                raise StepFailed(journal.failed) from error
            raise Stale from None
        except Exception as error:
            if not journal.begun or journal.whole:  # it has nothing to do with the steps
                raise
            raise StepFailed(journal.failed) from error
        finally:
            self._close(journal)

    def _close(self, journal: _Journal) -> None:
        journal.settle()
        if journal in self._journals:  # a signal handler's verb may have closed it meanwhile
            self._journals.remove(journal)


class _Journal:
    """The steps of one change, and how many of them were taken."""

    def __init__(self, calls: Sequence[partial[Any]], steps: Sequence[Step]) -> None:
        self.thread = threading.get_ident()
        self._calls = calls
        self._steps = steps
        self._taken: list[Any] = []
        self._undone: list[Any] = []

    @property
    def begun(self) -> bool:
        return len(self._taken) > 0

    @property
    def whole(self) -> bool:
        return len(self._taken) == len(self._calls)

    @property
    def failed(self) -> Step:
        """The step that raised: the first call only compares."""
        return self._steps[len(self._taken) - 1]

    def run(self) -> None:
        # One call: `extend` counts in `_taken` what `map` has called, without a bytecode in between.
        self._taken.extend(map(_call, self._calls))

    def settle(self) -> None:
        """If only some steps were taken, undo them, the last first. Again changes nothing."""
        if not self.begun or self.whole:
            return
        undo = [step.undo for step in reversed(self._steps[: len(self._taken) - 1])]
        while len(self._undone) < len(undo):
            try:
                self._undone.extend(map(_call, undo[len(self._undone) :]))
            except Exception:  # one place that refuses must not keep the others from being put back
                self._undone.append(None)
