"""What a trial did, and whether the patched run is worse."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import Any

import torch

from .changes import CHANGES
from .readers import READERS
from .states import STATES, NotMeant, only
from .subject import KINDS, Subject
from .trials import Trial

RIGHT, WRONG, ERROR, SPOILT = "right", "wrong", "error", "error that changed the layer"


@dataclass(frozen=True)
class Outcome:
    """What one reader showed, or the error that ended the trial."""

    what: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.detail})" if self.detail else self.what

    @property
    def ended(self) -> bool:
        return self.what in (ERROR, SPOILT)


Trace = tuple[Outcome, ...] | None
"""Outcome by outcome; None where the trial makes no sense."""


def fault(before: Trace, after: Trace) -> str:
    """Why ``after`` is worse than ``before``; empty if it is not."""
    if before is None and after is None:
        return ""
    if before is None or after is None:  # an error in one run came before the trial was found to make no sense
        trace = before if after is None else after
        assert trace is not None
        return (
            "" if after is None or all(outcome.what != WRONG for outcome in after) else "is wrong and only runs patched"
        )
    for number, now in enumerate(after):
        was = before[number] if number < len(before) else None
        if was is None:
            if before[-1].ended:
                if now.what == WRONG:
                    return f"an error became wrong: {before[-1]} -> {now}"
                if now.what == SPOILT and before[-1].what == ERROR:
                    return f"the error changes the layer: {now}"
            continue
        if was.what == RIGHT and now.what != RIGHT:
            return f"right became {now}"
        if was.ended and now.what == WRONG:
            return f"an error became wrong: {was} -> {now}"
        if now.what == SPOILT and was.what != SPOILT:
            return f"the error changes the layer: {was} -> {now}"
    if len(after) < len(before) and not before[len(after)].ended and not (after and after[-1].ended):
        return "shows less"
    return ""


def run(trial: Trial) -> Trace:
    """What the trial does in this process, which is left as it was."""
    random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed notes the stack for each kind of device
    try:
        subject = Subject.of(KINDS[trial.kind])
    except RuntimeError as error:  # bitsandbytes 0.46 has no FP4 on a CPU
        return (Outcome(ERROR, f"made: {error}"),)
    outcomes: list[Outcome] = []
    try:
        for name in trial.steps:
            if not _step(subject, name, outcomes):
                break
    except NotMeant:
        return None
    finally:
        _clean(subject)
    return tuple(outcomes)


def _step(s: Subject, name: str, outcomes: list[Outcome]) -> bool:
    known = READERS.get(name) or CHANGES.get(name)
    watched = known is not None and known.whole
    before = _held(s) if watched else None
    try:
        if name in READERS:
            for found, reference, tolerance in READERS[name].body(s):
                outcomes.append(compare(found, reference, tolerance))
        else:
            only(not s.given)
            (STATES.get(name) or CHANGES[name].body)(s)
    except NotMeant:
        raise
    except Exception as error:
        changed = (watched and before != _held(s)) or getattr(error, "_changed", False)
        said = f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        outcomes.append(Outcome(SPOILT if changed else ERROR, said))
        return False
    return True


def _held(s: Subject) -> Any:
    with contextlib.suppress(Exception):
        return s.held()
    return "cannot be read"


def compare(found: Any, reference: torch.Tensor, tolerance: float) -> Outcome:
    if not isinstance(found, torch.Tensor):
        return Outcome(WRONG, f"{type(found).__name__}, no tensor")
    found = found.detach().as_subclass(torch.Tensor)
    if found.is_meta:
        return Outcome(WRONG, "a tensor without numbers")
    if tuple(found.shape) != tuple(reference.shape):
        return Outcome(WRONG, f"shape {tuple(found.shape)}, not {tuple(reference.shape)}")
    one, other = found.double(), reference.detach().double()
    off = ((one - other).norm() / (other.norm() + 1e-12)).item()
    return Outcome(RIGHT if off <= tolerance else WRONG, f"{off:.2g}")


def _clean(s: Subject) -> None:
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    if s.call is not None:
        torch._dynamo.reset()
    for folder in s.folders:
        folder.cleanup()
