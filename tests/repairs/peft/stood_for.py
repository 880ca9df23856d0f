"""Small quantized models, and models of the weights that these stand for, to compare adapters on the two."""

from __future__ import annotations

import copy
from collections.abc import Callable

import bitsandbytes as bnb
import peft
import torch

import patches

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


def with_adapter(model: torch.nn.Module, config: peft.PeftConfig, trained: bool = True) -> torch.nn.Module:
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config).train()
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and trained:
                parameter += torch.randn_like(parameter) * 0.05
    return model


def assert_equal_to_dense(model: torch.nn.Module, plain: torch.nn.Module, at_least: int) -> None:
    """Outputs and gradients, of which there are ``at_least`` so many."""
    assert relative_error(model(X), plain(X)) < 0.02
    grads, expected = gradients(model), gradients(plain)
    assert len(grads) == len(expected) >= at_least
    for grad, reference in zip(grads, expected, strict=True):
        assert relative_error(grad, reference) < 0.05


def assert_unquantized_layers_are_as_before(
    patch_id: str, adapted: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    """Bit for bit, unmerged and merged; ``adapted`` puts the adapter on a model."""
    _, plain = models(8)
    before = adapted(copy.deepcopy(plain))
    out, grads = before(X), gradients(before)
    before.merge_adapter()
    merged = before(X)
    with patches.applied(patch_id):
        after = adapted(copy.deepcopy(plain))
        assert torch.equal(after(X), out)
        for grad, expected in zip(gradients(after), grads, strict=True):
            assert torch.equal(grad, expected)
        after.merge_adapter()
        assert torch.equal(after(X), merged)
        after.unmerge_adapter()
