"""One quantized layer with an adapter of peft: what reproducers of merging and of untrained adapters measure."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ...engine import CannotShow, Finding
from ...engine.gate import satisfied

if TYPE_CHECKING:
    from torch import Tensor


def quantized_layer(int8: bool, outputs: int = 64, bias: bool = True) -> Any:
    """Return a layer of 64 inputs that is quantized on the CPU, after setting the seed."""
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    torch.manual_seed(0)
    if int8:
        return Linear8bitLt(64, outputs, bias=bias, has_fp16_weights=False).to("cpu")
    return Linear4bit(64, outputs, bias=bias, compute_dtype=torch.float32, quant_type="nf4").to("cpu")


def quantized_model(int8: bool, bias: bool = True) -> tuple[Any, Tensor]:
    """Return a model of one layer that says that it is quantized, as ``from_pretrained`` makes it, and inputs."""
    import torch

    model: Any = torch.nn.Sequential(quantized_layer(int8, bias=bias))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = not int8, int8
    return model, torch.randn(4, 64)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, divided by the norm of ``expected``."""
    return float(((found - expected).norm() / expected.norm()).item())


def show_untrained_error(config: Any, int8: bool) -> Finding:
    """Put an adapter that changes nothing before its first step on a quantized layer, and compare the outputs.

    The model does not say that it is quantized, so peft takes its layer for plain layers.
    """
    import torch
    from peft import get_peft_model

    base, x = quantized_layer(int8, outputs=48), torch.randn(4, 64)
    expected = base(x).detach()
    model = get_peft_model(torch.nn.Sequential(base), config)
    tuner = type(config).__name__.removesuffix("Config")
    try:
        error = relative_error(model(x), expected)
    except RuntimeError as raised:
        return Finding(True, f"{tuner} on a quantized layer: {raised}")
    return Finding(error > 0.05, f"{tuner} before its first step: relative error of the output {error:.3f}")


def show_merge_error(config: Any) -> Finding:
    """Merge an adapter into an INT8 layer, and compare the output with the one before the merge."""
    import peft
    import torch

    _refuse_peft_014()
    base, x = quantized_model(int8=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft: merging rounds
        try:
            model = peft.get_peft_model(base, config)
        except TypeError as raised:
            return Finding(True, f"{type(config).__name__} on a quantized model: {raised}")
        expected = model(x)
        error = relative_error(model.merge_and_unload()(x), expected)
    return Finding(error > 0.1, f"relative error of the merged model {error:.2f}")


def show_unmerge_error(config: str, int8: bool = False, **options: Any) -> Finding:
    """Merge an adapter into a quantized layer, ask the model without adapters, and compare with what it was."""
    import peft
    import torch

    _refuse_peft_014()
    base, x = quantized_model(int8, bias=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft: merging rounds
        expected = base(x)
        model = peft.get_peft_model(base, getattr(peft, config)(target_modules=["0"], **options))
        model.merge_adapter()
        with model.disable_adapter():
            error = relative_error(model(x), expected)
    return Finding(error > 0, f"relative error of the model without its adapter {error:.1e}")


def _refuse_peft_014() -> None:
    import torch

    if satisfied("peft<0.15") and not torch.cuda.is_available():
        raise CannotShow("peft 0.14 dequantizes on CUDA only")
