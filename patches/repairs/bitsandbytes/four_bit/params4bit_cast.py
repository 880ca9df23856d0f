"""Casting a model casts the packed bits of its 4-bit weights as if they were values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ....engine import Finding, Patch, Rewrite
from ....process import live_objects
from ....quantized.four_bit import quant_states

if TYPE_CHECKING:
    from bitsandbytes.nn import Params4bit
    from torch import Tensor


def _moved(fn: Callable[[Tensor], Tensor], parameter: Tensor) -> Tensor:
    """Return ``fn(parameter)``, without its cast if ``parameter`` holds packed bits."""
    moved = fn(parameter)
    if moved.dtype is parameter.dtype or not quant_states.is_packed(parameter):
        return moved
    if moved.device == parameter.device:
        return parameter
    bits = parameter.to(moved.device)
    return bits if type(bits) is type(moved) else bits.data


def damage() -> tuple[str, ...]:
    """Name the weights whose packed bits were cast before the patch was applied."""
    weights = live_objects.without_garbage(_cast_weights)  # a weight and its layer refer to each other
    states = map(quant_states.get_quant_state, weights)
    return tuple(
        f"a 4-bit weight of shape {tuple(state.shape)} was packed as {weight.quant_storage} "
        f"and cast to {weight.dtype}, which destroyed its values: load the model again"
        for weight, state in zip(weights, states)
        if state is not None
    )


def _cast_weights() -> list[Params4bit]:
    """Find quantized weights of layers (not the casts that a user made of one) in another dtype than they were packed in."""
    from bitsandbytes.nn import Embedding4bit, Linear4bit

    layers = [layer for kind in (Linear4bit, Embedding4bit) for layer in live_objects.find_instances(kind)]
    held = (vars(layer).get("_parameters", {}).get("weight") for layer in layers)
    weights = {id(weight): weight for weight in held if quant_states.is_marked_quantized(weight)}.values()
    states = ((weight, quant_states.get_quant_state(weight)) for weight in weights)
    # The layout of the AVX512-BF16 kernel is uint8 whatever the storage.
    plain = (weight for weight, state in states if state is not None and not quant_states.is_for_cpu_kernel(state))
    return [weight for weight in plain if weight.dtype != weight.quant_storage]


def defect() -> Finding:
    """Cast a layer in bfloat16 storage to float16."""
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(
        64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4", quant_storage=torch.bfloat16
    ).to("cpu")
    packed = layer.weight.data.view(torch.uint8).clone()
    layer.half()
    changed = layer.weight.data.view(torch.uint8) != packed
    return Finding(bool(changed.any()), f"{int(changed.sum())} of {changed.numel()} packed bytes changed by half()")


PATCH = Patch(
    id="bitsandbytes-params4bit-cast",
    summary="half(), float() and to(dtype) destroy 4-bit weights in floating point storage (FSDP-QLoRA)",
    groups=("move", "layers"),
    silent=True,
    words=("loss is nan, or does not fall",),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L421",),
    why="""
        FSDP needs all parameters in one dtype, so QLoRA with FSDP stores packed weights as bfloat16
        (``bnb_4bit_quant_storage=torch.bfloat16``). ``nn.Module.half()``, ``.float()`` and ``.to(dtype)`` cast
        every floating-point parameter, these too. After ``PeftModel.half()`` or ``.to(torch.float16)`` the packed
        weights are destroyed (logits are off by 0.84 of their norm), and after ``.float()`` the forward raises an
        error. transformers refuses such casts for its own models, but not for a ``PeftModel`` or a plain module.
        0.46.1 to 0.50.2. With uint8 storage these calls do not change the weight, because it is not a floating-point
        tensor.
    """,
    repair="""
        With the repair a module that casts and moves its parameters moves packed bits and does not cast them, with any
        storage and in any module. A parameter that is not quantized yet is cast as before. So
        is a parameter that the user casts by hand, as in ``weight.to(torch.int32)``.

        The repair is in ``torch.nn.Module._apply``, the only place where a cast of a module differs from a cast of
        a tensor.
    """,
    cost="""
        One call for each parameter that a module moves.
    """,
    requires=("bitsandbytes>=0.46",),
    tested_up_to="0.50.2",
    edits=(Rewrite.to_call("torch.nn.modules.module:Module._apply", "fn(param)", _moved, "fn, param"),),
    defect=defect,
    damage=damage,
)
