"""Gradients of offloaded adapters: accelerate drops them with the weights that it brought, and no step can use them.

Other gradients of such a model (of its inputs, say) are computed. An optimizer that is to train the
adapters would silently do nothing, so its step raises an error.
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

# The parameters that layers had when they were offloaded: an optimizer that was made before holds these.
_parameters_before: weakref.WeakKeyDictionary[Module, list[weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()
_layers_with_loss: weakref.WeakSet[Module] = weakref.WeakSet()
_optimizer_hooks: list[
    Any
] = []  # one, from the first loss on; it stays, because torch is iterating its hooks when it runs


def remember_parameters(layer: Module) -> None:
    """Remember the parameters of ``layer``, which is about to be offloaded."""
    _parameters_before[layer] = [weakref.ref(p) for p in layer.parameters() if not p.is_meta]


def watch_gradients(layer: Module) -> None:
    """Watch the gradients of the offloaded modules below ``layer``, whose forward has brought them."""
    for module in layer.modules():
        if accelerate_hooks.hook_of(module, visited=True) is not None:
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    parameter.register_hook(partial(_record_loss, weakref.ref(layer)))


def _record_loss(layer: weakref.ref[Module], gradient: Tensor) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    module = layer()
    if module is None:
        return
    _layers_with_loss.add(module)
    if not _optimizer_hooks:
        _optimizer_hooks.append(register_optimizer_step_pre_hook(_check_step))


def _check_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raise if ``optimizer`` is to step without the gradients that were lost."""
    layers = [layer for layer in _layers_with_loss if offloaded_modules.is_offloaded(layer)]
    if not layers:
        return
    old = {id(p) for layer in layers for known in _parameters_before.get(layer, ()) if (p := known()) is not None}
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if any(p.requires_grad and p.grad is None and (p.is_meta or id(p) in old) for p in parameters):
        raise RuntimeError(
            f"this optimizer has offloaded adapter weights, such as those of {row_scales.name_of(layers[0])!r}. "
            "accelerate loads offloaded weights for one forward and drops their gradients, so no step can train them. "
            "To train them, offload the base model first (device_map, cpu_offload), then add the adapters. To train "
            "other parameters only, give the optimizer the parameters that are not offloaded "
            "(p for p in model.parameters() if p.requires_grad and not p.is_meta)"
        )
