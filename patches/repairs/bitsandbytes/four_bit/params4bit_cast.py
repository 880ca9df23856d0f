"""Casting a model casts the packed bits of its 4-bit weights as if they were numbers.

FSDP needs all parameters in one dtype, so QLoRA with it packs the codes into bfloat16 "numbers"
(``bnb_4bit_quant_storage=torch.bfloat16``). ``nn.Module.half()``, ``.float()`` and ``.to(dtype)`` cast
every floating point parameter, these too: after ``PeftModel.half()`` or ``.to(torch.float16)`` the codes
are rounded to nonsense (logits off by 0.84 of their norm), after ``.float()`` forward crashes.
transformers refuses such casts on its own models; a ``PeftModel`` or a bare module does not. 0.46.1 to
0.50.2.

With uint8 storage the same calls leave the weight alone, because it is no floating point tensor. The
repair makes that so for any storage: the casts of a quantized ``Params4bit`` return it as it is, and
``to(device, dtype)`` moves it without the dtype. A parameter that is not quantized yet is cast as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...helpers import live_objects
from ....engine import Finding, Patch, Rewrite, SetAttribute

if TYPE_CHECKING:
    from bitsandbytes.nn import Params4bit


def unless_quantized(name: str) -> Callable[[Callable[..., Any] | None], Callable[..., Any]]:
    """``make`` for ``Params4bit.<name>``, one of the casts that ``torch.Tensor`` has as a method."""

    def make(original: Callable[..., Any] | None) -> Callable[..., Any]:
        def cast(self: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            if self.bnb_quantized and (name != "type" or args or kwargs):  # type() only asks
                return self
            return (original or getattr(torch.Tensor, name))(self, *args, **kwargs)

        cast.__name__ = name
        return cast

    return make


def damage() -> tuple[str, ...]:
    """Weights whose bits were cast before the patch was applied: in another dtype than they were packed in."""
    if _cast_weights():
        live_objects.collect()  # a weight and its layer refer to each other: those that are gone do not count
    return tuple(
        f"a 4-bit weight of shape {tuple(weight.quant_state.shape)} was packed as {weight.quant_storage} "
        f"and cast to {weight.dtype}: its codes are lost, load the model again"
        for weight in _cast_weights()
    )


def _cast_weights() -> list[Params4bit]:
    from bitsandbytes.nn import Params4bit

    quantized = [w for w in live_objects.instances(Params4bit) if w.bnb_quantized and w.quant_state]
    # The layout of the AVX512-BF16 kernel is uint8 whatever the storage.
    plain = [w for w in quantized if not getattr(w.quant_state, "packing_format_for_cpu", False)]
    return [w for w in plain if w.dtype != w.quant_storage]


def defect() -> Finding:
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(
        64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4", quant_storage=torch.bfloat16
    ).to("cpu")
    codes = layer.weight.data.view(torch.uint8).clone()
    layer.half()
    changed = layer.weight.data.view(torch.uint8) != codes
    return Finding(bool(changed.any()), f"{int(changed.sum())} of {changed.numel()} packed bytes changed by half()")


PATCH = Patch(
    id="bitsandbytes-params4bit-cast",
    summary="half(), float() and to(dtype) destroy 4-bit weights in floating point storage (FSDP-QLoRA)",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L421",),
    requires=("bitsandbytes>=0.46",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            "bitsandbytes.nn.modules:Params4bit.to",
            find="super().to(device=device, dtype=dtype, non_blocking=non_blocking)",
            replace="super().to(device=device, dtype=None if self.bnb_quantized else dtype, non_blocking=non_blocking)",
        ),
        *(
            SetAttribute(f"bitsandbytes.nn.modules:Params4bit.{name}", make=unless_quantized(name))
            for name in ("half", "bfloat16", "float", "double", "type")
        ),
    ),
    defect=defect,
    damage=damage,
)
