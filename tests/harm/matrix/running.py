"""Trials in forks of a process that has imported everything: as is, with all patches, with some."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import pickle
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from .readers import READERS
from .judge import ERROR, RIGHT, SPOILT, WRONG, Outcome, Trace, fault, run
from .trials import Trial

SECONDS = 60
"""More than any trial takes; one that waits is an error."""
_OURS = ("patches", "bnb_patches")
Found = dict[Trial, Trace]


def prepare() -> None:
    """What forks find imported, so that none pays for it."""
    import accelerate  # noqa: F401
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import transformers.integrations.bitsandbytes
    from peft.tuners.lora import bnb  # noqa: F401
    from peft.utils.integrations import dequantize_module_weight  # noqa: F401

    del transformers
    with contextlib.suppress(Exception):
        run(Trial("int8", ("lora", "forward")))
    gc.collect()
    gc.freeze()


def as_is(trials: Iterable[Trial]) -> Found:
    return _in_forks(trials, _hide)


def patched(trials: Iterable[Trial], ids: Collection[str] = (), without: Callable[[], None] | None = None) -> Found:
    """With the patches ``ids``, or all; ``without`` takes something out of them first."""

    def begin() -> None:
        import patches

        if without:
            without()
        patches.apply(*ids)

    return _in_forks(trials, begin)


def _hide() -> None:
    """As if the plugin were not installed: importing it raises."""
    names = [name for name in sys.modules if name.startswith(_OURS)]
    sys.modules.update(dict.fromkeys({*names, "patches"}))  # type: ignore[arg-type]


def _in_forks(trials: Iterable[Trial], begin: Callable[[], None]) -> Found:
    """The traces; a trial that ends its process is an error, and the rest runs in another."""
    left, found = list(dict.fromkeys(trials)), Found()
    while left:
        told, finished = _fork(left, begin)
        for trial, trace in zip(left, told):
            found[trial] = trace
        if len(told) < len(left) and not finished:
            found[left[len(told)]] = (Outcome(ERROR, "the process ended"),)
            left = left[len(told) + 1 :]
        else:
            left = left[len(told) :]
    return found


def _fork(trials: Sequence[Trial], begin: Callable[[], None]) -> tuple[list[Trace], bool]:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(receive)
            _serve(trials, begin, send)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(send)
    told: list[Trace] = []
    with os.fdopen(receive, "rb") as pipe, contextlib.suppress(EOFError):
        if pickle.load(pipe) != "begun":
            raise RuntimeError("a fork of the matrix could not begin: see what it printed")
        while True:
            told.append(pickle.load(pipe))
    _, status = os.waitpid(child, 0)
    return told, status == 0


def _serve(trials: Sequence[Trial], begin: Callable[[], None], send: int) -> None:
    torch.set_num_threads(1)
    tempfile.tempdir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # no disk to wait for
    logging.disable()
    warnings.simplefilter("ignore")
    begin()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGALRM, _late)
    with os.fdopen(send, "wb") as pipe:
        pickle.dump("begun", pipe)
        for number, trial in enumerate(trials):
            signal.alarm(SECONDS)
            try:
                trace = run(trial)
            except Late:
                trace = (Outcome(ERROR, f"takes more than {SECONDS} s"),)
            signal.alarm(0)
            pickle.dump(trace, pipe)
            pipe.flush()
            if number % 200 == 199:
                gc.collect()


class Late(BaseException):
    """A trial does not end."""


def _late(*_: Any) -> None:
    raise Late


# -- who did it ----------------------------------------------------------------------------------


def judged(trials: Iterable[Trial], ids: Collection[str] = ()) -> tuple[Found, Found]:
    """As is and patched. What shows nothing but right results patched cannot be worse, and is not run as is."""
    after = patched(trials, ids)
    doubtful = [trial for trial, trace in after.items() if any(outcome.what != RIGHT for outcome in trace or ())]
    return as_is(doubtful), after


def worse(before: Found, after: Found) -> dict[Trial, str]:
    """Why each trial is worse; not one whose layer computes the same wrong numbers as is.

    Where the library raises an error in an earlier step, a repair of that step shows what comes later: that is judged
    by what the library shows of it without that step, and without the next in which it raises one.
    """
    found = {trial: why for trial in before if (why := fault(before[trial], after[trial]))}
    asked = {trial: [*_without_error(trial, before[trial]), *_until_error(trial, after[trial]),
                     *(_up_to_readers(trial) if why.startswith("an error became") else ())]
             for trial, why in found.items()}  # fmt: skip
    while any(asked.values()):  # each time one step shorter
        shown = as_is(other for each in asked.values() for other in each)
        cleared = [trial for trial, others in asked.items() if any(_shows(found[trial], shown[o]) for o in others)]
        for trial in cleared:
            del found[trial]
        asked = {trial: [*dict.fromkeys(less for other in asked[trial] for less in _without_error(other, shown[other])
                                        if len(less.steps) < len(other.steps))] for trial in found}  # fmt: skip
    return found


def _until_error(trial: Trial, trace: Trace) -> list[Trial]:
    """What the library does where the patched layer stops before the end: wrong numbers there are not to go on with."""
    step = trace[-1].detail.partition(":")[0] if trace and trace[-1].ended else trial.steps[-1]
    if step not in trial.steps[:-1]:
        return []
    steps = trial.steps[: trial.steps.index(step) + 1]
    ends = ("forward_tied",) if step == "tied" else ("forward", "forward_eval")
    return [Trial(trial.kind, (*steps, end)) for end in ends]


def _up_to_readers(trial: Trial) -> list[Trial]:
    """What the library computes where each reader in the middle looks, without the readers before."""
    changes = [[name for name in trial.steps[:at] if name not in READERS]
               for at, name in enumerate(trial.steps[:-1]) if name in READERS]  # fmt: skip
    return [Trial(trial.kind, (*steps, "forward")) for steps in changes]


def _without_error(trial: Trial, trace: Any) -> list[Trial]:
    step = trace[-1].detail.partition(":")[0] if trace and trace[-1].ended else ""
    if step not in trial.steps:
        return []
    at = trial.steps.index(step)
    until, after = trial.steps[:at], trial.steps[at + 1 :]
    found = [(*until, *after), *((*until, *after[:-1], end) for end in ("forward", "forward_eval"))] if after else []
    if step in READERS:
        found += [(*until, end) for end in ("forward", "forward_eval", "state_dict")]
    return [Trial(trial.kind, steps) for steps in found]


def _shows(why: str, trace: Trace) -> bool:
    """Whether the library is wrong in ``trace`` as well, or leaves the layer changed by an error, if that is the fault."""
    spoils = why.startswith("the error changes the layer")
    return bool(trace) and any(outcome.what == WRONG or (spoils and outcome.what == SPOILT) for outcome in trace)


def culprits(trials: Sequence[Trial], before: Found) -> dict[Trial, list[str]]:
    """The patch that makes each trial worse alone, or the smallest set found by halving that does so together."""
    found: dict[Trial, list[str]] = {}
    everything = candidates()
    for trial in trials:
        ids = everything
        while len(ids) > 1:
            half = len(ids) // 2
            guilty = [part for part in (ids[:half], ids[half:])
                      if fault(before[trial], patched([trial], part)[trial])]  # fmt: skip
            if not guilty:
                break
            ids = guilty[0]
        found[trial] = ids if len(ids) < len(everything) // 2 else [f"no half of all {len(ids)} alone"]
    return found


def candidates() -> list[str]:
    """The patches that are in here when all are applied."""
    receive, send = os.pipe()
    if os.fork() == 0:
        try:
            logging.disable()
            import patches

            report = patches.apply()
            ids = [row.id for row in report.with_status(patches.Status.APPLIED)]
            os.write(send, json.dumps(ids).encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        ids = json.load(pipe)
    os.wait()
    return [
        name for name in ids if name.startswith(("bitsandbytes", "peft", "accelerate", "transformers", "torch"))
    ] or ids


def shrunk(trial: Trial) -> Trial:
    """The shortest trial that is worse, found by leaving steps out."""
    from .trials import shorter

    while True:
        candidates_ = list(shorter(trial))
        bad = worse(before := as_is(candidates_), patched(before))
        if not bad:
            return trial
        trial = min(bad, key=lambda t: (len(t.steps), t.steps))
