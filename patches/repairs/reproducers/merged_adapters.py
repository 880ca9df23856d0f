"""An adapter that is merged into a quantized layer and taken out again."""

from __future__ import annotations

import warnings
from typing import Any

from ...engine import CannotShow, Finding
from ...engine.gate import satisfied


def show_unmerge_error(config: str, int8: bool = False, **options: Any) -> Finding:
    """Merge an adapter into a quantized layer, run the model without adapters, and compare with the output before."""
    import peft
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    if satisfied("peft<0.15") and not torch.cuda.is_available():
        raise CannotShow("peft 0.14 dequantizes on CUDA only")
    torch.manual_seed(0)
    if int8:
        layer = Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    else:
        layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    base: Any = torch.nn.Sequential(layer).to("cpu")
    base.is_loaded_in_4bit, base.is_loaded_in_8bit = not int8, int8  # as from_pretrained says it
    x = torch.randn(4, 64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft: merging rounds
        expected = base(x)
        model = peft.get_peft_model(base, getattr(peft, config)(target_modules=["0"], **options))
        model.merge_adapter()
        with model.disable_adapter():
            error = float((model(x) - expected).norm() / expected.norm())
    return Finding(error > 0, f"relative error of the model without its adapter {error:.1e}")
