"""One table of a live model: its layers, its trainable parameters, and the problems that it will meet.

Everything is read from attributes: shapes, dtypes, devices, hooks, states. No tensor is read, moved or made, no
module is called, no library is imported. What cannot be repaired by a patch is said here in words.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..process_registry import REGISTRY
from . import adapters, layers, problems, training
from .records import Facts, Problem
from .table import Inspection
from .transformers_names import Naming

__all__ = ["Inspection", "inspect"]


def inspect(model: Any, optimizer: Any = None) -> Inspection:
    """Say in one table what a live model consists of, what of it trains, and what will go wrong.

    It changes nothing, reads no contents of tensors, imports nothing, and needs no patch applied. ``print()`` shows
    the table and below it each problem with what to do; a notebook shows it as a table. ``.problems`` has the problems
    that no applied patch has repaired. Programs use ``.problems``, ``.to_dict()`` and ``.to_json()``.

    Parameters
    ----------
    model:
        Any ``torch.nn.Module``: of transformers, wrapped by peft, dispatched by accelerate, compiled, or plain.
    optimizer:
        Its ``torch.optim.Optimizer``. After ``zero_grad()`` only the optimizer knows which parameters got no gradient.

    Raises
    ------
    TypeError
        ``model`` or ``optimizer`` has another type.
    """
    torch = sys.modules.get("torch")
    _demand(model, getattr(torch, "nn", None), "Module", "model", "a torch.nn.Module")
    if optimizer is not None:
        _demand(optimizer, getattr(torch, "optim", None), "Optimizer", "optimizer", "a torch.optim.Optimizer")
        optimizer = training.unwrap_optimizer(optimizer)
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[union-attr]  # asking a shape calls no one
        return Inspection(_read(model, optimizer))


def _demand(thing: object, module: Any, name: str, argument: str, wanted: str) -> None:
    if module is None or isinstance(thing, type) or not isinstance(thing, getattr(module, name)):
        given = f"the class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
        raise TypeError(f"patches.inspect: {argument} must be {wanted}, not {given}")


def _read(model: Any, optimizer: Any) -> Facts:
    modules = list(model.named_modules())
    found = adapters.find_adapters(modules)
    of_adapters = adapters.tensor_ids(found)
    base = layers.find_layers(modules, of_adapters)
    naming = Naming(modules, any(layer.weight.quantized for layer in base))
    named = dict(model.named_parameters())
    parameters = {name: p for name, p in named.items() if p.requires_grad}
    trains = training.read_training(modules, parameters, of_adapters, optimizer)
    on = training.checkpointing(modules, parameters, naming.heads)
    known = set(map(id, named.values()))
    state = training.optimizer_state(optimizer, known, parameters) if optimizer is not None else None
    wrong = problems.find_problems(base, found, parameters, trains, on, state, naming)
    return Facts(
        model=type(model).__name__,
        layers=layers.layer_lines(base, naming),
        adapters=adapters.adapter_lines(found),
        training=trains,
        checkpointing=on,
        optimizer=state,
        problems=tuple(_with_status(wrong)),
        asked=layers.requested_config(base, naming),
        places=layers.place_lines(base),
    )


def _with_status(found: Iterable[Problem]) -> Iterator[Problem]:
    """Add the status of the patches that the problems name."""
    states: dict[str, str] = {}
    for problem in found:
        if problem.patch:
            states = states or {result.id: str(result.status) for result in REGISTRY.report()}
            problem = replace(problem, status=states[problem.patch])
        yield problem
