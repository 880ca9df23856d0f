"""Dequantizing the layers of a model that accelerate offloads: each stays offloaded, with its hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..offload import offloaded_modules, weights_maps
from ..quantized import accelerate_hooks
from . import source_layers

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


def replace_offloaded_layers(
    model: Module, quantized: type[Any], dtype: torch.dtype | None, dequantize: Callable[[Any, Any], torch.Tensor]
) -> bool:
    """Replace the offloaded layers of the class ``quantized`` by plain ones, and tell whether there were any.

    ``dequantize`` is given the weight of a layer, of shape (out, in), and its INT8 state (None in 4 bits). The result
    is cast to ``dtype``, unless that is None.
    """
    away = {name: m for name, m in model.named_modules() if isinstance(m, quantized) and m.weight.is_meta}
    for name, module in away.items():
        if accelerate_hooks.hook_of(module) is None:
            raise ValueError(
                f"{name!r} cannot be dequantized: its weight is on meta, and no hook of accelerate loads it. Offload the model "
                "without preload_module_classes, or dequantize it before it is offloaded."
            )
    for name, module in away.items():
        model.set_submodule(name, _make_plain(module, dtype, dequantize))
    return bool(away)


def _make_plain(module: Any, dtype: torch.dtype | None, dequantize: Callable[[Any, Any], torch.Tensor]) -> Module:
    """Make the plain layer for ``module``, offloaded by its hook; ``module`` is left on meta without one."""
    import torch
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    part = accelerate_hooks.hook_of(module)
    visit = offloaded_modules.Visit(module, part)
    try:
        weight = dequantize(module.weight, getattr(module, "state", None))
        plain = source_layers.make_source_layer(module, module.bias)
        weight = source_layers.to_source_layout(module, weight if dtype is None else weight.to(dtype))
        plain.weight = torch.nn.Parameter(weight)
        plain.bias = module.bias
        plain.train(module.training)
        weights_maps.write_to_map(part, "weight", plain.weight)
    finally:
        visit.end()
    hook, original_devices = vars(module).pop("_hf_hook"), part.original_devices
    remove_hook_from_module(module)
    add_hook_to_module(plain, hook)
    part.original_devices = original_devices  # where its weights go if the hook is taken away
    return plain
