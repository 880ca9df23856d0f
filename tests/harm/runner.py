"""Running a program under a set of patches, and leaving nothing behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import patches
from patches.engine.ids import patch_id_of

from .catalogue import HANDOVER, Case
from .checks import Check
from .layers import quantized
from .rule import Died, Raised, Trace

Observe = Callable[[], contextlib.AbstractContextManager[Any]]
_OURS = ("patches", "bnb_patches", "bnb_patches_autoload")
Sets = tuple[frozenset[str], frozenset[str]]
"""The patches that are in until a program hands over, and those after. Both the same for any other program."""


def run(case: Case, sets: Sets, observe: Observe = contextlib.nullcontext) -> Trace:
    """What ``case`` does with these patches, each named set applied while it holds; ``observe`` goes around it."""
    if case.may_crash:
        return _forked(lambda: _run(case, sets, observe))
    return _run(case, sets, observe)


def _run(case: Case, sets: Sets, observe: Observe) -> Trace:
    checks: list[Check] = []
    with _clean(case), contextlib.ExitStack() as stack:
        stack.enter_context(plugin(sets[0]))
        try:
            with observe():
                for shown in case.start():
                    if shown is HANDOVER:
                        stack.close()
                        stack.enter_context(plugin(sets[1]))
                    else:
                        checks.append(shown)
        except Exception as error:
            return Trace(tuple(checks), Raised.of(error))
    return Trace(tuple(checks))


def run_layer(case: Case, observe: Observe) -> None:
    """The layer of ``case`` alone, trained and evaluated once without any patch."""
    with _clean(case), plugin(frozenset()):
        q = quantized(case.kind, case.device, **case.program.options)
        with observe():
            q.layer(q.inputs(grad=True)).sum().backward()
            with torch.no_grad():
                q.layer.eval()(q.x)


@contextlib.contextmanager
def plugin(ids: frozenset[str]) -> Iterator[None]:
    """Exactly the patches ``ids`` are in; with none, the plugin cannot even be imported, as if not installed."""
    active = _active()
    if not ids:
        assert not active
        with _not_installed():
            yield
    elif ids == active:
        yield
    else:
        assert not active
        with patches.applied(*ids):
            yield


def _active() -> frozenset[str]:
    active = patches.REGISTRY._store.read().active
    return frozenset(patch_id_of(key) for key in active)  # a report takes longer than most programs


@contextlib.contextmanager
def _not_installed() -> Iterator[None]:
    if sys.modules["patches"] is None:  # for a group of programs, and again for each
        yield
        return
    hidden = {n: m for n, m in sys.modules.items() if n.startswith(_OURS) and n.partition(".")[0] in _OURS}
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: import raises
    try:
        yield
    finally:
        sys.modules.update(hidden)


@contextlib.contextmanager
def _clean(case: Case) -> Iterator[None]:
    """The process as a program may expect it, and the proof that it was left so."""
    random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():  # where it is not, a seed waits for it in a list, each with its stack
        torch.cuda.manual_seed_all(0)
    before = _settings()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if case.program.compiles:
            torch.compiler.reset()
    assert _settings() == before, f"{case.id} leaves the process changed: {before} became {_settings()}"


def _settings() -> dict[str, Any]:
    from torch.nn.utils import parametrize

    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "saved-tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "threads": (torch.get_num_threads(), sys.getswitchinterval()),
        "parametrization cache": parametrize._cache_enabled,
        "profile": sys.getprofile(),
    }


def _forked(function: Callable[[], Trace]) -> Trace:
    """``function`` in a fork of this process, whose death is an error like another."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(receive)
            with os.fdopen(send, "wb") as pipe:
                pickle.dump(function(), pipe)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        told = pipe.read()
    status = os.waitpid(child, 0)[1]
    if told:
        return pickle.loads(told)
    return Trace((), Raised(Died, f"the process ended with {status}"))
