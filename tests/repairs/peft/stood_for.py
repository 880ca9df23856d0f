"""Small quantized models, and models of the weights that these stand for, to compare adapters on the two."""

from __future__ import annotations

import bitsandbytes as bnb
import torch

X = torch.linspace(-2, 2, 6 * 64).view(2, 3, 64)


def layer(bits: int, bias: bool) -> torch.nn.Module:
    if bits == 8:
        return bnb.nn.Linear8bitLt(64, 64, bias=bias, has_fp16_weights=False)
    return bnb.nn.Linear4bit(64, 64, bias=bias, compute_dtype=torch.float32, quant_type="nf4")


def models(bits: int, bias: bool = True) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A quantized model, and one of the weights that it stands for."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(layer(bits, bias), torch.nn.ReLU(), layer(bits, bias)).to("cpu")
    plain = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias), torch.nn.ReLU(), torch.nn.Linear(64, 64, bias)))
    for quantized, dense in zip(model[::2], plain[::2], strict=True):
        weight = quantized.weight
        if bits == 8:
            dense.weight.data = bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        else:
            dense.weight.data = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        if bias:
            dense.bias.data.copy_(quantized.bias.data)
    return model, plain


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    x = X.clone().requires_grad_()
    model(x).pow(2).sum().backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.requires_grad and p.grad is not None)]


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return ((out.double() - reference.double()).norm() / reference.double().norm()).item()
