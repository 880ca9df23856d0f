"""Read what trains: parameters, gradients, gradient checkpointing and the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..offload.forward_uses import bytes_of_parameter
from .records import Checkpointing, OptimizerState, Training
from .tensors import Modules, count_dtypes, imported_attribute, is_instance_of

Named = dict[str, Any]


def read_training(modules: Modules, parameters: Named, adapters: set[int], optimizer: Any) -> Training:
    """Say which parameters train, and which of these got no gradient.

    ``adapters`` holds the ids of the tensors of adapters. After a step, ``optimizer`` knows which parameters never had
    a gradient.
    """
    without = [name for name, p in parameters.items() if p.grad is None]
    gradients = len(parameters) - len(without)
    if not gradients:  # after zero_grad() all look as if they had got none
        without = _never_stepped(parameters, optimizer)
    return Training(
        names=tuple(parameters),
        outside=tuple(name for name, p in parameters.items() if id(p) not in adapters),
        tensors=len(parameters),
        parameters=sum(int(p.numel()) for p in parameters.values()),
        bytes=sum(bytes_of_parameter(p) for p in parameters.values()),
        dtypes=count_dtypes(parameters.values()),
        gradients=gradients,
        without_gradient=tuple(without),
        modules=dict(Counter("train" if module.training else "eval" for _, module in modules)),
    )


def _never_stepped(parameters: Named, optimizer: Any) -> list[str]:
    held = _held(optimizer) if optimizer is not None else {}
    if not any(optimizer.state.get(p) for p in held.values()):
        return []  # no step yet, or one that keeps no state
    return [name for name, p in parameters.items() if id(p) in held and not optimizer.state.get(p)]


# -- gradient checkpointing ------------------------------------------------------------------------


def checkpointing(modules: Modules, parameters: Named, heads: Iterable[Any]) -> Checkpointing | None:
    """Describe gradient checkpointing; None if it is off. ``heads``: the output embeddings, which come after all layers."""
    on = {name: module for name, module in modules if vars(module).get("gradient_checkpointing") is True}
    layers = {
        n: m for n, m in on.items() if is_instance_of(m, "transformers.modeling_layers", "GradientCheckpointingLayer")
    }
    on = layers or on
    if not on:
        return None
    kinds = {_reentrant(module) for module in on.values()}
    reentrant = kinds == {True}
    kind = "reentrant" if reentrant else "non-reentrant" if kinds == {False} else "unknown"
    return Checkpointing(len(on), kind, _idle(modules, on, parameters, heads if reentrant else None))


def _reentrant(module: Any) -> bool | None:
    """Return the value of ``use_reentrant``; None if unknown: unsloth and others put a function of their own there."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    given = getattr(function, "keywords", {}).get("use_reentrant")
    if given is not None:
        return bool(given)
    default = imported_attribute("torch.utils.checkpoint", "checkpoint")  # reentrant, with a warning
    return True if getattr(function, "func", function) is default else None


def _idle(modules: Modules, layers: Named, parameters: Named, heads: Iterable[Any] | None) -> str:
    resting = sum(not module.training for module in layers.values())
    if resting:
        return f"{'they' if resting == len(layers) else f'{resting} of them'} are in eval mode"
    if heads is not None and parameters and not _inputs_require_grad(modules, [*layers.values(), *heads], parameters):
        return "reentrant, and nothing makes the inputs of the layers require grad"
    return ""


def _inputs_require_grad(modules: Modules, not_before: Iterable[Any], parameters: Named) -> bool:
    """Tell whether an embedding trains, or has the hook of transformers or peft that makes its output require grad.

    A parameter that trains and is not in the modules ``not_before`` is taken for one before the layers.
    """
    after = {id(p) for module in not_before for p in module.parameters()}
    if any(id(p) not in after for p in parameters.values()):
        return True
    hooks = (hook for _, module in modules for hook in module._forward_hooks.values())
    return any("require_grad" in getattr(hook, "__name__", "") for hook in hooks)


# -- the optimizer -----------------------------------------------------------------------------------


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that accelerate and others have wrapped."""
    inner = vars(optimizer).get("optimizer")
    base = imported_attribute("torch.optim", "Optimizer")
    return unwrap_optimizer(inner) if isinstance(inner, base) else optimizer


def _held(optimizer: Any) -> dict[int, Any]:
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def optimizer_state(optimizer: Any, known: set[int], parameters: Named) -> OptimizerState:
    """Describe ``optimizer``. ``known``: the ids of all parameters of the model; ``parameters``: the trained ones."""
    held = _held(optimizer)
    states = [state for p in held.values() if (state := optimizer.state.get(p))]
    tensors = [value for state in states for value in state.values() if hasattr(value, "element_size")]
    settings = getattr(optimizer, "args", None)
    return OptimizerState(
        kind=f"{type(optimizer).__module__.split('.')[0]}'s {type(optimizer).__name__}",
        tensors=len(held),
        stepped=len(states),
        in_8_bits=sum(any(map(_small, state.values())) for state in states),
        bits=_bits(optimizer, settings),
        smallest=int(getattr(settings, "min_8bit_size", 0) or 0),
        bytes=sum(map(bytes_of_parameter, tensors)),
        dtypes=count_dtypes(tensors),
        sharded=sum(type(p).__name__ == "DTensor" for p in held.values()),
        outside=sum(key not in known for key in held),
        missing=tuple(name for name, p in parameters.items() if id(p) not in held),
    )


def _bits(optimizer: Any, settings: Any) -> int | None:
    asked = getattr(settings, "optim_bits", None)
    if isinstance(asked, int):
        return asked
    name = type(optimizer).__name__.lower()
    return next((bits for word, bits in (("8bit", 8), ("fp8", 8), ("4bit", 4)) if word in name), None)


def _small(value: Any) -> bool:
    """Tell whether it is a moment in 8 bits: uint8 in bitsandbytes, a class of their own in torchao's optimizers."""
    if not hasattr(value, "element_size"):
        return False
    return str(value.dtype) == "torch.uint8" or type(value).__name__.startswith("OptimState")
