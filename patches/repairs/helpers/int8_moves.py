"""INT8 codes are never quantized a second time, and keep their scales where they go.

The edits of ``bitsandbytes-int8-requantized-codes``. Before 0.48 ``Int8Params.to`` itself spoils codes: 0.46.1 quantizes
them again when they are on a CPU and are moved, also to where they are, 0.47.0 does so for a GPU, and drops codes and
scales on other ways. There, whatever makes a weight an ``Int8Params`` where there was a plain tensor or an error has
the same edits, so that each patch is right alone too: the next ``.to()`` would spoil what it has just mended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Rewrite
from . import int8_scales

if TYPE_CHECKING:
    from torch import Tensor


def _quantize(B: Tensor, state: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, row scales and outliers of the weight ``B``; int8 codes are taken as they are."""
    import torch
    from bitsandbytes.functional import int8_vectorwise_quant

    if B.dtype != torch.int8:
        quantized: tuple[Tensor, Tensor, Tensor | None] = int8_vectorwise_quant(B.to(torch.float16))
        return quantized
    scale: Any = getattr(B, "SCB", None)
    if not int8_scales.is_lost(scale):
        return B.data, scale.to(B.device), None
    raise int8_scales.lost(int8_scales.layer_of(state))


def _moved_scale(old: Any, new: Any) -> Tensor | None:
    """The scale of ``old``, a parameter that was moved to ``new``."""
    if old.SCB is None or (int8_scales.is_lost(old.SCB) and new.device.type != "meta"):
        return None
    scale: Tensor = old.SCB.to(new.device)
    return scale


_TO = "bitsandbytes.nn.modules:Int8Params.to"
_INIT = "bitsandbytes.nn.modules:Linear8bitLt.init_8bit_state"
_NAMES = {"_patches_quantize_int8": _quantize}


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


KEEP_CODES = (
    *_forward("MatMul8bitLt"),
    *_forward("MatMul8bitFp", when="bitsandbytes>=0.47"),
    Rewrite(
        _INIT,
        "self.state.SCB = self.weight.SCB",
        "self.state.SCB = _patches_scale(self)",
        names={"_patches_scale": int8_scales.scale},
    ),
    Rewrite(_INIT, "self.weight.SCB = None", "self.weight.SCB = self.state.SCB"),
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
        "new_param.CB = new_param.data if new_param.dtype == torch.int8 else self.CB",
        when="bitsandbytes<0.48",
    ),
    Rewrite(
        _TO,
        "new_param.SCB = self.SCB",
        "new_param.SCB = _patches_moved_scale(self, new_param)",
        names={"_patches_moved_scale": _moved_scale},
        when="bitsandbytes<0.48",
    ),
)

KEEP_CODES_BEFORE_048 = tuple(
    edit._replace(when=" and ".join(filter(None, (edit.when, "bitsandbytes<0.48")))) for edit in KEEP_CODES
)
