"""A 4-bit image model is dequantized where it is if there is no GPU to move it to."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch

import patches

from . import image_options

pytest.importorskip("diffusers")

ID = "diffusers-dequantize-without-gpu"


def without_gpu(monkeypatch):
    for kind in (torch.cuda, torch.xpu):
        monkeypatch.setattr(kind, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("it asks for a CUDA device"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
def test_weights_are_those_that_bitsandbytes_reads(flux, monkeypatch, dtype, double):
    model = image_options.load(flux, {**image_options.NF4, "bnb_4bit_use_double_quant": double}, dtype)
    names = image_options.packed(model)
    weights = [model.get_parameter(name) for name in names]
    expected = [bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state) for weight in weights]
    without_gpu(monkeypatch)
    with patches.applied(ID):
        plain = model.dequantize()
    for name, values in zip(names, expected, strict=True):
        assert torch.equal(plain.get_parameter(name), values) and plain.get_parameter(name).dtype is dtype


def test_after_a_forward(flux, monkeypatch):
    model = image_options.load(flux, image_options.NF4)
    without_gpu(monkeypatch)
    with patches.applied(ID, "bitsandbytes-cpu-repack", untested=True):
        quantized = image_options.output(model)
        plain = image_options.output(model.dequantize())
    assert ((plain - quantized).norm() / quantized.norm()).item() < 0.02


def test_bytes_that_the_cpu_cannot_read_raise(flux, monkeypatch):
    model = image_options.load(flux, image_options.NF4)
    model.x_embedder.weight.quant_state.packing_format_for_cpu = True
    without_gpu(monkeypatch)
    with patches.applied(ID), pytest.raises(ValueError, match=r"'x_embedder\.weight' cannot be dequantized"):
        model.dequantize()


def test_with_a_gpu_it_is_moved_there_and_back(flux, monkeypatch):
    model, moves = image_options.load(flux, image_options.NF4), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(type(model), "to", lambda self, device: moves.append(device))
    with patches.applied(ID):
        model.dequantize()
    assert moves == [3, "cpu"]
