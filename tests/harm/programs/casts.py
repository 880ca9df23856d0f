"""Casts, moves and arithmetic on a parameter, by hand."""

from __future__ import annotations

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Int8Params, Params4bit

from ..catalogue import program
from ..checks import close, same
from ..layers import BOTH, INT8, NF4, Quantized

STORAGES = (*NF4, "nf4-float-storage")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor)


@program(kinds=NF4)
def codes_in_a_wider_type(q: Quantized):
    """A converter to another format does bit arithmetic on the codes."""
    wide = q.layer.weight.to(torch.int32)
    yield same(plain(wide << 8), q.codes.to(torch.int32) << 8)


@program(kinds=NF4)
def codes_by_type(q: Quantized):
    """The same with ``type()``, which also tells the type when it is not given one."""
    yield same(q.layer.weight.type(), q.codes.type())
    yield same(plain(q.layer.weight.type(torch.int16)), q.codes.to(torch.int16))


@program()
def statistics_of_the_codes(q: Quantized):
    """A look at how the codes are spread, in the types that have a mean."""
    yield same(plain(q.layer.weight.double().std()), q.codes.double().std())
    yield same(plain(q.layer.weight.float().mean()), q.codes.float().mean())
    yield same(plain(q.layer.weight.half()), q.codes.half())
    yield same(plain(q.layer.weight.bfloat16()), q.codes.bfloat16())


@program()
def a_histogram_of_the_codes(q: Quantized):
    """Counting how often each byte occurs."""
    counts = torch.bincount(q.layer.weight.flatten().to(torch.int64) + 128)
    yield same(plain(counts), torch.bincount(q.codes.flatten().long() + 128))


@program(kinds=INT8)
def dequantized_by_hand(q: Quantized):
    """Codes times scales, as the paper says."""
    weight = q.layer.weight
    yield close(weight.data.float() * weight.SCB.view(-1, 1) / 127, q.weight, 1e-6)


@program(kinds=INT8)
def cast_and_dequantized_by_hand(q: Quantized):
    """The same with a cast of the parameter, whose scales are read off what came out."""
    weight = q.layer.weight.to(torch.float32)
    yield close(weight.data * weight.SCB.view(-1, 1) / 127, q.weight, 1e-6)


@program(kinds=NF4)
def dequantized_by_the_library(q: Quantized):
    """``dequantize_4bit`` on the weight, its data, and a clone."""
    weight = q.layer.weight
    for codes in (weight, weight.data, weight.detach().clone()):
        yield close(dequantize_4bit(codes, weight.quant_state), q.weight, 1e-6)


@program()
def like_another_tensor(q: Quantized):
    """``weight.to(other)``, as adapters do to be where the weight is."""
    cast = q.layer.weight.to(torch.zeros(1, dtype=torch.float64, device=q.device))
    yield same(plain(cast), q.codes.double())


@program(kinds=BOTH)
def device_and_dtype_at_once(q: Quantized):
    """``weight.to(device, dtype)``, by position and by name."""
    yield same(plain(q.layer.weight.to(q.device, torch.float32)), q.codes.float())
    yield same(plain(q.layer.weight.to(device=q.device, dtype=torch.int32)), q.codes.int())


@program(kinds=(*BOTH, "nf4-float-storage"))
def moved_and_put_back(q: Quantized):
    """The weight goes through the CPU and becomes the parameter of the layer again."""
    q.layer.weight = q.layer.weight.cpu().to(q.device)
    yield q.right(q.layer(q.x))


@program(kinds=("nf4", "nf4-double", "nf4-float-storage", "int8"), bias=True)
def the_module_in_half(q: Quantized):
    """``layer.half()``, then inputs in half."""
    y = q.layer.half()(q.x.half())
    yield close(y, q.expected(), 2e-2, rounding="the bias keeps its dtype only with the patches")


@program(kinds=STORAGES, bias=True)
def the_module_to_bfloat16_and_back(q: Quantized):
    """A model is cast for a moment and cast back; only the bias is a number that can lose bits."""
    q.layer.to(torch.bfloat16).to(torch.float32)
    yield close(q.layer(q.x), q.expected(), 1e-2)


@program(kinds=STORAGES)
def the_model_in_double(q: Quantized):
    """``model.double()`` of a quantized layer and a norm, for a check of gradients."""
    model = torch.nn.Sequential(q.layer, torch.nn.LayerNorm(q.layer.out_features, device=q.device)).double()
    expected = torch.nn.functional.layer_norm(q.expected(), q.expected().shape[-1:])
    yield close(model(q.x.double()), expected, 1e-4)


@program()
def what_a_summary_prints(q: Quantized):
    """Shape, dtype, bytes and class, as the tools print them that list a model."""
    weight = q.layer.weight
    yield same((tuple(weight.shape), weight.dtype), (tuple(q.codes.shape), q.codes.dtype))
    yield same(weight.numel() * weight.element_size(), q.codes.nbytes)
    yield same(weight.is_floating_point(), q.codes.is_floating_point())
    yield same(sum(p.numel() for p in q.layer.parameters()), q.codes.numel())


@program()
def tensors_like_the_weight(q: Quantized):
    """``zeros_like`` and its family, for accumulators of the same shape."""
    weight = q.layer.weight
    yield same(plain(torch.zeros_like(weight, dtype=torch.float32)), torch.zeros_like(q.codes, dtype=torch.float32))
    yield same(plain(torch.ones_like(weight)), torch.ones_like(q.codes))
    yield same(tuple(weight.new_zeros(3).shape), (3,))


@program()
def codes_as_numpy(q: Quantized):
    """The codes leave torch."""
    array = q.layer.weight.detach().cpu().numpy()
    yield same(int(array.astype("int64").sum()), int(q.codes.long().sum()))


@program()
def codes_compared(q: Quantized):
    """Which codes two checkpoints have in common."""
    equal = (q.layer.weight == q.other().layer.weight).sum()
    yield same(int(equal), int((q.codes == q.other().codes).sum()))
    yield same(torch.equal(q.layer.weight, q.codes), True)


@program(kinds=NF4)
def a_parameter_made_by_hand(q: Quantized):
    """``Params4bit`` without a layer, multiplied by ``matmul_4bit``."""
    options = {"compress_statistics": q.layer.weight.compress_statistics, "quant_type": "nf4"}
    weight = Params4bit(q.unquantized().weight.data, requires_grad=False, **options).to(q.device)
    y = bitsandbytes.matmul_4bit(q.x, weight.t(), quant_state=weight.quant_state)
    yield q.right(y)


@program(kinds=INT8)
def an_int8_parameter_made_by_hand(q: Quantized):
    """``Int8Params`` without a layer, and a layer that is given it."""
    weight = Int8Params(q.unquantized().weight.data, requires_grad=False).to(q.device)
    yield same(weight.data, q.codes)
    layer = q.unquantized(seed=3).to(q.device)
    layer.weight = weight
    yield q.right(layer(q.x))


@program(kinds=("nf4", "int8", "int8-fp16"))
def float_weights_before_they_are_quantized(q: Quantized):
    """Arithmetic on the weights of a layer that is not on its device yet: scaled, cast, and then quantized."""
    layer = q.unquantized()
    original = layer.weight.detach().clone().as_subclass(torch.Tensor)
    yield same(plain(layer.weight.half().float()), original.half().float())
    with torch.no_grad():
        layer.weight.mul_(2)
    y = layer.requires_grad_(False).to(q.device)(q.x)
    yield close(y, 2 * q.x @ original.to(q.device).T, 0.2)


@program(kinds=("nf4", "int8"))
def a_float_layer_cast_before_it_is_quantized(q: Quantized):
    """``Linear4bit(...).half()`` and then onto the device: the weights are numbers until there."""
    layer = q.unquantized(bias=True).half().requires_grad_(False)
    expected = torch.nn.functional.linear(q.x.cpu(), layer.weight.float(), layer.bias.float())
    y = layer.to(q.device)(q.x.half())
    yield close(y, expected.to(q.device), 0.2, rounding="the bias keeps its dtype only with the patches")
