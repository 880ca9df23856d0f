"""Packed INT8 weights are never quantized a second time, and keep their scales where they go.

The edits of ``bitsandbytes-int8-scales-lost-on-offload``. Before 0.48 ``Int8Params.to`` itself spoils packed weights: 0.46.1
quantizes them again when they are on a CPU and are moved, also to where they are, 0.47.0 does so for a GPU, and drops
packed weights and scales on other ways. There, whatever makes a weight an ``Int8Params`` where there was a plain tensor
or an error has the same edits, so that each patch is right alone too: the next ``.to()`` would undo the repair.

0.48.0 and 0.48.1 raise an error if scales are on meta, as the scales of an offloaded weight are. There, whatever lets such a weight
be moved has the same edits, and those of its backward: an offloaded layer would raise a less clear error later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ...engine import Rewrite, SetAttribute
from ..layer_methods import wrap_method
from . import plain_weights, row_scales, scale_ownership
from .product_backward import PRODUCT_BACKWARD

if TYPE_CHECKING:
    from torch import Tensor


def _quantize(B: Tensor, state: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return packed weights, row scales and outliers of the weight ``B``; packed INT8 weights are taken as they are."""
    import torch
    from bitsandbytes.functional import int8_vectorwise_quant

    if B.dtype != torch.int8:
        quantized: tuple[Tensor, Tensor, Tensor | None] = int8_vectorwise_quant(B.to(torch.float16))
        return quantized
    scale: Any = getattr(B, "SCB", None)
    if not row_scales.is_lost(scale):
        return B.data, scale.to(B.device), None
    raise row_scales.make_lost_error(row_scales.layer_of(state))


def _moved_scale(old: Any, new: Any) -> Tensor | None:
    """Return the scale of ``old``, a parameter that was moved to ``new``: on the device of ``new``, or where it is if that is meta.

    accelerate passes it on from a weight on meta to the one that it brings back, for a layer that reads its weight alone.
    """
    scale: Tensor | None = old.SCB
    if scale is None or new.device.type == "meta":
        return scale
    return None if row_scales.is_lost(scale) else scale.to(new.device)


def _is_new(old: Any, new: Any) -> bool:
    """Tell whether ``new``, to which ``old`` was moved, is new for its layer; not if the layer has run and nothing moves."""
    return old.CB is not None or new.is_meta or new.data_ptr() != old.data_ptr()


def _moved_packed_weight(old: Any, new: Any) -> Tensor | None:
    """Return the packed weight that marks ``new`` as new for its layer."""
    import torch

    packed: Tensor | None = new.data if new.dtype == torch.int8 and _is_new(old, new) else old.CB
    return packed


def follow_move(layer: Any, weight: Any, address: int) -> None:
    """Move packed weights and scales of ``layer`` after its ``weight``, whose values lay at ``address`` before."""
    import torch

    state = getattr(layer, "state", None)
    holders: tuple[Any, ...] = (weight,) if state is None else (weight, state)
    for holder in holders:
        packed = getattr(holder, "CB", None)
        if packed is not None and packed.data_ptr() in (address, weight.data_ptr()):
            holder.CB = weight.data
        elif packed is not None and packed.device != weight.device:  # someone has put others there
            holder.CB = packed.to(weight.device)
    for holder in holders:
        scale = getattr(holder, "SCB", None)
        if scale is None or scale.device == weight.device:
            continue
        if not row_scales.is_lost(scale):
            holder.SCB = scale.to(weight.device)
        elif not address:  # the weight was on meta as well: load_state_dict fills both
            holder.SCB = torch.empty_like(scale, device=weight.device)
    if state is not None:
        scale_ownership.show_scales_of_state(layer)  # the weight may be another object by now


def follow_data(layer: Any) -> None:
    """Move packed weights and scales in the state of ``layer`` to where ``weight.data`` was put."""
    weight, state = layer.weight, layer.state
    if weight.device == state.CB.device or weight.is_meta or weight.dtype != state.CB.dtype:
        return
    state.CB = weight.data
    if not row_scales.is_lost(state.SCB):
        state.SCB = state.SCB.to(weight.device)


_TO = "bitsandbytes.nn.modules:Int8Params.to"
_INIT = "bitsandbytes.nn.modules:Linear8bitLt.init_8bit_state"
_NAMES = {"_patches_quantize_int8": _quantize}


SETTLING = Rewrite(
    _INIT,
    "self.state.CB = self.weight.CB",
    "self.state.CB = _patches_before_settling(self)",
    names={"_patches_before_settling": scale_ownership.packed_weight_to_settle},
)
"""Of ``init_8bit_state``: complete the scales while the state has its former tensors."""


SCALE_OR_ERROR = Rewrite(
    _INIT,
    "self.state.SCB = self.weight.SCB",
    "self.state.SCB = _patches_scale(self)",
    names={"_patches_scale": row_scales.require_scales},
)
"""Of ``init_8bit_state``: a layer without row scales raises an error that names it."""


def _forward(function: str, when: str = "") -> tuple[Rewrite, ...]:
    target = f"bitsandbytes.autograd._functions:{function}.forward"
    return (
        Rewrite(
            target,
            "state.has_fp16_weights or state.CB is None",
            "state.has_fp16_weights or state.CB is None or state.SCB is None",
            when=when,
        ),
        Rewrite(
            target,
            "F.int8_vectorwise_quant(B.to(torch.float16))",
            "_patches_quantize_int8(B, state)",
            names=_NAMES,
            when=when,
        ),
    )


def scales_follow(condition: str, when: str) -> tuple[Rewrite, ...]:
    """Edits of ``Int8Params.to``, which moves the scales if ``condition`` is true: they follow every move and cast."""
    follow = 'self.SCB is not None and (self.SCB.device.type != "meta" or new_param.device.type == "meta")'
    return (
        Rewrite(_TO, condition, follow, when=when),
        Rewrite(_TO, "self.SCB.to(device)", "self.SCB.to(new_param.device)", when=when),
    )


def _only_on(releases: str, edits: Iterable[Rewrite | SetAttribute]) -> Iterator[Rewrite | SetAttribute]:
    """``edits``, for certain releases of bitsandbytes."""
    return (edit._replace(when=" and ".join(filter(None, (edit.when, f"bitsandbytes{releases}")))) for edit in edits)


_MOVES: tuple[Rewrite | SetAttribute, ...] = (
    *_forward("MatMul8bitLt"),
    *_forward("MatMul8bitFp", when="bitsandbytes>=0.47"),
    SETTLING,
    SCALE_OR_ERROR,
    Rewrite(
        _INIT,
        "self.weight.SCB = None",
        "self.weight.SCB = None\n_patches_settled(self)",
        names={"_patches_settled": scale_ownership.record_first_forward},
    ),
    scale_ownership.SCALES_OF_THE_LAYER,
    Rewrite(
        "bitsandbytes.nn.modules:Linear8bitLt._save_to_state_dict",
        "super()._save_to_state_dict(destination, prefix, keep_vars)",
        "_patches_agree(self)\nsuper()._save_to_state_dict(destination, prefix, keep_vars)",
        names={"_patches_agree": plain_weights.check_plain_weight},
    ),
    Rewrite.to_call(
        "bitsandbytes.nn.modules:Linear8bitLt._save_to_state_dict",
        "getattr(self.state, scb_name)",
        plain_weights.scale_to_save,
        "self",
    ),
    wrap_method("Linear8bitLt", "__setstate__", scale_ownership.load_pickled),
    Rewrite(
        _TO,
        'self.data.device.type == "cpu"',
        'self.data.device.type == "cpu" and self.data.dtype != torch.int8',
        when="bitsandbytes<0.47",
    ),
    Rewrite(
        _TO,
        'device.type != "cpu" or self.data.dtype != torch.int8',
        "self.data.dtype != torch.int8",
        when="bitsandbytes>=0.47,<0.48",
    ),
    Rewrite(
        _TO,
        "new_param.CB = self.CB",
        "new_param.CB = _patches_moved_packed_weight(self, new_param)",
        names={"_patches_moved_packed_weight": _moved_packed_weight},
        when="bitsandbytes<0.48",
    ),
    Rewrite(
        _TO,
        "new_param.SCB = self.SCB",
        "new_param.SCB = _patches_moved_scale(self, new_param)",
        names={"_patches_moved_scale": _moved_scale},
        when="bitsandbytes<0.48",
    ),
    # what a hook brings back is new, as on 0.48.1; where a layer has run, SCALE_OR_ERROR finds the scales that belong to it
    Rewrite(
        _TO,
        "self.CB is not None",
        "_patches_is_new(self, new_param)",
        names={"_patches_is_new": _is_new},
        when="bitsandbytes==0.48.0",
    ),
    Rewrite(_TO, "is_quantized and device is not None", "is_quantized", when="bitsandbytes==0.48.0"),
    *scales_follow("self.SCB is not None", when="bitsandbytes==0.48.0"),
    *scales_follow("self.SCB is not None and device is not None", when="bitsandbytes==0.48.1"),
)


KEEP_PACKED_WEIGHT: tuple[Rewrite | SetAttribute, ...] = (*_MOVES, *_only_on(">=0.48,<0.48.2", PRODUCT_BACKWARD))


def keep_packed_weight(releases: str) -> tuple[Rewrite | SetAttribute, ...]:
    """:data:`KEEP_PACKED_WEIGHT`, for certain releases of bitsandbytes."""
    return tuple(_only_on(releases, KEEP_PACKED_WEIGHT))


KEEP_PACKED_WEIGHT_BEFORE_048 = tuple(_only_on("<0.48", _MOVES))
"""Without the edits of 0.48, whose sources these patches would rest on."""
