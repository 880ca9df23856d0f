"""Packed INT8 weights are loaded without their scales, silently."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ....engine import Finding, Patch, Rewrite
from ....process import call_stack
from ....process.tensor_bits import have_same_bits
from ....quantized.int8 import row_scales, scale_ownership
from ....quantized.int8.weight_moves import SCALE_OR_ERROR
from ....quantized.layer_methods import Load
from ....quantized.own_packed_weights import is_own_packed_weight

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear8bitLt
    from torch import Tensor

_WEIGHT_CAME = "_patches_weight_came_alone"
_SCALES_CAME = "_patches_scales_came_alone"


def _guarded(load: Callable[..., None], layer: Linear8bitLt) -> Callable[..., None]:
    """Return ``load`` (the ``_load_from_state_dict`` of ``nn.Module``), but for packed weights that ``layer`` cannot read."""
    return partial(_load, layer, load)


def _load(layer: Linear8bitLt, *args: Any, **kwargs: Any) -> None:
    load = Load(*args, **kwargs)
    weight, scales = (load.state_dict.get(load.prefix + name) for name in ("weight", "SCB"))
    alone = weight is not None and scales is None and not _has_known_scales(layer, weight, load.assign)
    if alone and _is_part(layer, weight, load.assign):
        scales_are_new = vars(layer.state).pop(_SCALES_CAME, False)
        load.run()
        if not scales_are_new:
            scale_ownership.give_ownership_to_weight(None, layer)
            setattr(layer.state, _WEIGHT_CAME, True)
        return
    error = ""
    if alone:
        error = (
            f"the state dict has no {load.prefix + 'SCB'!r}, "
            "its row scales. Load the model.state_dict() of a quantized model, which has weights and scales; "
            "named_parameters() has no scales. If you load with broadcast_from_rank0=True, torch gives the scales to "
            "rank 0 only: load the same state dict on every rank instead"
        )
    elif weight is not None and _would_be_cut_off(layer, weight, load.assign):
        error = (
            "the layer is quantized, and the state dict has "
            f"{weight.dtype}, expected packed INT8. Load it before the layer is moved to a device, which quantizes it"
        )
    elif weight is not None and scales is not None and _not_quantized(layer, weight, load.assign):
        error = (
            "Loading a quantized checkpoint into non-quantized "
            f"{type(layer).__name__} is not supported: its weight is {layer.weight.dtype}. Move the layer to a "
            "device first, which quantizes it, or call load_state_dict(..., assign=True)"
        )
    if error:
        load.error_msgs.append(f"While loading the INT8 weight {load.prefix + 'weight'!r}: {error}")
        return
    if scales is not None:
        _make_place(layer, scales, weight is None)
    load.run()


def _is_part(layer: Linear8bitLt, weight: Any, assign: bool) -> bool:
    """Tell whether ``weight`` replaces packed weights of ``layer``, and its scales may come from another file."""
    from bitsandbytes.nn import Int8Params

    own = layer.weight
    if assign or weight.shape != own.shape:
        return False
    whole = isinstance(own, Int8Params) and row_scales.is_int8(own) and not hasattr(own, "_local_tensor")
    return whole and call_stack.loads_in_parts()


def _make_place(layer: Linear8bitLt, scales: Tensor, alone: bool) -> None:
    """Before ``scales`` are loaded, make place for them if the packed weights came before; note that they came ``alone``."""
    import torch

    kept = vars(layer.state)
    kept.pop(_SCALES_CAME, None)
    if kept.pop(_WEIGHT_CAME, False) and row_scales.known_scales(layer) is None:
        empty = torch.empty(layer.weight.shape[0], device=layer.weight.device, dtype=torch.float32)
        scale_ownership.give_ownership_to_weight(empty, layer)
    elif alone and (own := row_scales.known_scales(layer)) is not None and not have_same_bits(own, scales.to(own)):
        setattr(layer.state, _SCALES_CAME, True)


def _has_known_scales(layer: Linear8bitLt, weight: Any, assign: bool) -> bool:
    """Tell whether ``weight`` needs no scales, or they are there when it is loaded: it is the layer's, or carries them."""
    import torch
    from bitsandbytes.nn import Int8Params

    if weight.dtype != torch.int8 or layer.state.has_fp16_weights:
        return True
    if layer.weight.dtype == torch.int8 and is_own_packed_weight(weight, layer.weight):
        return True
    carries = isinstance(weight, Int8Params) and row_scales.is_unsettled(weight)
    return assign and carries and row_scales.get_scales(weight) is not None


def _not_quantized(layer: Linear8bitLt, weight: Any, assign: bool) -> bool:
    """Tell whether ``weight`` is packed and ``layer`` holds floats; bitsandbytes sees that when it has loaded ``weight``."""
    return not assign and row_scales.is_int8(weight) and bool(layer.weight.is_floating_point())


def _would_be_cut_off(layer: Linear8bitLt, weight: Any, assign: bool) -> bool:
    """Tell whether ``weight`` is unquantized, and torch would truncate it to integers, most of them 0."""
    quantized = row_scales.is_int8(layer.weight) and not layer.weight.is_meta
    if not quantized or not weight.is_floating_point() or weight.is_meta:
        return False
    if assign or hasattr(layer.weight, "_local_tensor"):
        return False
    return bool((weight != weight.round()).any())


def defect() -> Finding:
    """Load packed weights without the scales that belong to them."""
    import bitsandbytes as bnb
    import torch

    torch.manual_seed(0)
    saved, live = (bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to("cpu") for _ in range(2))
    x = torch.randn(4, 64)
    expected = saved(x)
    try:
        live.load_state_dict({"weight": saved.weight.data})
    except RuntimeError:
        return Finding(False, "load_state_dict raises an error that names the weight")
    error = ((live(x) - expected).norm() / expected.norm()).item()
    return Finding(
        error > 0, f"relative error of the output {error:.3f} after load_state_dict(strict=True) without SCB"
    )


PATCH = Patch(
    id="bitsandbytes-int8-weights-without-scales",
    former_ids=("bitsandbytes-int8-codes-without-scales",),
    summary="INT8 weights that arrive without SCB are loaded silently, and every output is wrong",
    groups=("save", "shard"),
    silent=True,
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        ``SCB`` is neither a parameter nor a buffer, so ``load_state_dict(strict=True)`` does not report it as
        missing. If packed weights arrive alone, they are combined with the scales that the layer had, and every
        output is wrong. This happens with ``set_model_state_dict(broadcast_from_rank0=True)``, which sends only
        parameters and buffers to the other ranks, and with a saved ``dict(model.named_parameters())``. A layer that
        is not quantized yet takes the packed weights as values. All releases.
    """,
    repair="""
        With the repair, packed weights without scales raise an error that names the layer, and the layer is left as it
        was. Packed weights alone are accepted in two cases: they equal the packed weights that the layer has, so its
        scales fit, or they are assigned as an ``Int8Params`` that carries its scales. A program that loads the files of
        a checkpoint one by one with ``strict=False`` may find weight and scales in two of them: the layer then has no
        scales until they are loaded, and raises an error that names it if it computes before that. transformers'
        ``load_sharded_checkpoint`` is such a program. Floating-point weights for a quantized layer raise an error too,
        because torch would truncate them to integers.
    """,
    requires=("bitsandbytes>=0.46",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite.to_call(
            "bitsandbytes.nn.modules:Linear8bitLt._load_from_state_dict",
            "super()._load_from_state_dict",
            _guarded,
            "super()._load_from_state_dict, self",
        ),
        SCALE_OR_ERROR,
    ),
    defect=defect,
)
