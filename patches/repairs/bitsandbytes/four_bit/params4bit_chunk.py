"""``weight.chunk()`` and ``weight.split()`` of a ``Params4bit`` give plain tensors.

Since 0.47.0 ``torch.chunk`` and ``torch.split`` keep the class and the quantization state, for the sake of
FSDP2; the methods of the same names, and calls that name the argument (``torch.chunk(input=weight, …)``:
IndexError), were left out, and 0.46.1 has nothing of it. A part of a weight that is not quantized yet also
keeps the layer of the whole: quantizing it gives that layer the state of a part.

The repair lets all four spellings take the same way, and parts belong to no layer.
"""

from __future__ import annotations

from typing import Any

from ....engine import Finding, Patch, Rewrite, SetAttribute

_TORCH_FUNCTION = "bitsandbytes.nn.modules:Params4bit.__torch_function__"


def _keep_class(original: None) -> classmethod:
    """``__torch_function__`` for the release that has none."""
    import torch
    from bitsandbytes.nn import Params4bit

    def __torch_function__(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in [torch.chunk, torch.split, torch.Tensor.chunk, torch.Tensor.split]:
            return super(Params4bit, cls).__torch_function__(func, types, args, kwargs)
        whole = args[0] if args else kwargs.get("input", kwargs.get("tensor"))
        return tuple(
            cls(
                part,
                whole.requires_grad,
                whole.quant_state,
                whole.blocksize,
                whole.compress_statistics,
                whole.quant_type,
                whole.quant_storage,
                bnb_quantized=whole.bnb_quantized,
            )
            for part in super(Params4bit, cls).__torch_function__(func, types, args, kwargs)
        )

    return classmethod(__torch_function__)


def defect() -> Finding:
    """Take a weight apart by its methods."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    weight = Linear4bit(64, 64, quant_type="nf4").to("cpu").weight
    parts = [*weight.chunk(2), *weight.split(1024)]
    kept = sum(isinstance(part, Params4bit) and part.quant_state is not None for part in parts)
    return Finding(kept < len(parts), f"{kept} of {len(parts)} parts keep their quantization state")


PATCH = Patch(
    id="bitsandbytes-params4bit-chunk",
    summary="chunk() and split() of a 4-bit weight lose its class and its quantization state",
    links=(),
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        SetAttribute(_TORCH_FUNCTION, make=_keep_class, when="bitsandbytes<0.47"),
        Rewrite(
            _TORCH_FUNCTION,
            "[torch.chunk, torch.split]",
            "[torch.chunk, torch.split, torch.Tensor.chunk, torch.Tensor.split]",
            when="bitsandbytes>=0.47",
        ),
        Rewrite(
            _TORCH_FUNCTION,
            "args[0]",
            "(args[0] if args else kwargs.get('input', kwargs.get('tensor')))",
            when="bitsandbytes>=0.47",
        ),
        Rewrite(_TORCH_FUNCTION, "tensor.module", "None", count=2, when="bitsandbytes>=0.47"),
    ),
    defect=defect,
)
