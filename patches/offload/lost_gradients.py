"""Gradients of offloaded adapters: accelerate drops them with the weights that it brought, and no step can use them.

Other gradients of such a model (of its inputs, say) are computed. An optimizer that is to train the
adapters would do nothing, without a word: its step is an error.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from ..quantized import accelerate_hooks
from ..quantized.int8 import row_scales
from . import offloaded_modules

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_before: weakref.WeakKeyDictionary[Module, list[weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()
"""The parameters that layers had when they were offloaded: an optimizer that was made before holds these."""

_lost: weakref.WeakSet[Module] = weakref.WeakSet()
"""Layers alive that lost a gradient. Empty, and no optimizer is asked, until that happens."""

_looking: list[Any] = []
"""The handle of the look at optimizers, once there is one. It stays: torch is in the midst of its hooks when it looks."""


def remember_gradients(layer: Module) -> None:
    """Called when ``layer`` is about to be offloaded."""
    _before[layer] = [weakref.ref(p) for p in layer.parameters() if not p.is_meta]


def watch_gradients(layer: Module) -> None:
    """Called in the forward of ``layer``, when the offloaded modules below it are there."""
    for module in layer.modules():
        if accelerate_hooks.hook_of(module, visited=True) is not None:
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    parameter.register_hook(partial(_note, weakref.ref(layer)))


def _note(layer: weakref.ref[Module], gradient: Tensor) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    module = layer()
    if module is None:
        return
    _lost.add(module)
    if not _looking:
        _looking.append(register_optimizer_step_pre_hook(_look))


def _look(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raise if ``optimizer`` is to step without the gradients that were lost."""
    layers = [layer for layer in _lost if offloaded_modules.is_offloaded(layer)]
    if not layers:
        return
    old = {id(p) for layer in layers for known in _before.get(layer, ()) if (p := known()) is not None}
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if any(p.requires_grad and p.grad is None and (p.is_meta or id(p) in old) for p in parameters):
        raise RuntimeError(
            f"this optimizer has offloaded adapter weights, such as those of {row_scales.name_of(layers[0])!r}. "
            "accelerate loads offloaded weights for one forward and drops their gradients, so no step can train them. "
            "To train them, offload the base model first (device_map, cpu_offload), then add the adapters. To train "
            "other parameters only, give the optimizer the parameters that are not offloaded "
            "(p for p in model.parameters() if p.requires_grad and not p.is_meta)"
        )
