"""The scales of quantized layers that diffusers offloads in groups: they go where the packed weights go.

diffusers sets ``parameter.data`` of the layers of a group, which leaves behind what lies beside the packed weights: the
quantization state of a 4-bit weight, the row scales and the packed weights in the state of an INT8 layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..quantized.four_bit import quant_states
from ..quantized.int8 import row_scales, weight_moves

if TYPE_CHECKING:
    from torch import Tensor

_hosts: weakref.WeakKeyDictionary[Any, dict[tuple[int, str], tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()
"""For each group the scales that are on the device, and the ones on the host that they were copied from."""


def onload_group(move: Callable[[], None], group: Any) -> None:
    """Run ``move``, which brings the weights of ``group`` to the device, and bring their scales."""
    hosts = _hosts.setdefault(group, {})

    def bring(host: Tensor, device: Any, place: tuple[int, str]) -> Tensor:
        brought = host.to(device, non_blocking=True)
        hosts[place] = brought, host
        return brought

    _move_layers(move, group, bring)


def offload_group(move: Callable[[], None], group: Any) -> None:
    """Run ``move``, which takes the weights of ``group`` from the device, and take away their scales."""
    hosts = _hosts.pop(group, {})

    def take_away(tensor: Tensor, device: Any, place: tuple[int, str]) -> Tensor:
        brought, host = hosts.get(place, (None, None))
        if tensor is brought and host is not None:
            return host  # as diffusers does with the weights, if there is a stream
        host = tensor.to(device)
        return host.pin_memory() if host.is_cpu and group.stream is not None and not group.low_cpu_mem_usage else host

    _move_layers(move, group, take_away)


def _move_layers(
    move: Callable[[], None], group: Any, move_scale: Callable[[Tensor, Any, tuple[int, str]], Tensor]
) -> None:
    layers = [(layer, layer.weight.data_ptr()) for layer in _quantized_layers(group)]
    move()
    for layer, address in layers:
        weight: Tensor = layer.weight
        for holder, name in _places_of_scales(layer):
            scale: Tensor = getattr(holder, name)
            if scale.device != weight.device and not scale.is_meta and not weight.is_meta:
                setattr(holder, name, move_scale(scale, weight.device, (id(holder), name)))
        if row_scales.is_int8(weight):
            weight_moves.follow_move(layer, weight, address)


def _quantized_layers(group: Any) -> Iterator[Any]:
    """Yield the layers in ``group`` that have a quantized weight."""
    for module in group.modules:
        for layer in module.modules():
            weight = layer._parameters.get("weight")
            if weight is not None and (quant_states.get_quant_state(weight) or row_scales.is_int8(weight)):
                yield layer


def _places_of_scales(layer: Any) -> Iterator[tuple[Any, str]]:
    """Yield the places of the tensors that belong to the packed weights of ``layer``: an object and an attribute."""
    state = quant_states.get_quant_state(layer.weight)
    if state is None:
        yield from row_scales.places_of_scales(layer)
        return
    if quant_states.is_for_cpu_kernel(state):
        raise RuntimeError(
            f"{type(layer).__name__} {row_scales.name_of(layer)!r} cannot be offloaded in groups, because a forward on the CPU "
            "has changed the layout of its packed weights. Load the model again, and offload it before you run it."
        )
    yield from quant_states.places_of_tensors(state)
