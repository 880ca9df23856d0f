"""``copy``, ``deepcopy`` and pickle, of parameters, layers and models."""

from __future__ import annotations

import copy
import pickle

import torch
from bitsandbytes.functional import dequantize_4bit

from ..catalogue import program
from ..checks import close, same
from ..layers import BOTH, INT8, NF4, Quantized


@program(kinds=(*BOTH, "int8-fp16"), bias=True)
def a_layer_deeply(q: Quantized):
    """A deep copy computes the same, and writing to it leaves the original alone."""
    copied = copy.deepcopy(q.layer)
    yield q.right(copied(q.x))
    copied.weight.data.zero_()
    copied.bias.data.zero_()
    yield q.right(q.layer(q.x))


@program(packs="too", bias=True)
def a_model_deeply_after_inference(q: Quantized):
    """A teacher is copied from a student that has run."""
    student = torch.nn.Sequential(q.layer, torch.nn.ReLU()).eval()
    with torch.no_grad():
        student(q.x)
        yield close(copy.deepcopy(student)(q.x), q.expected().relu(), q.tolerance, q.rounding)


@program()
def a_float_layer_deeply_then_quantized(q: Quantized):
    """Several layers are made from one that is not quantized yet; each is quantized for itself."""
    layer = q.unquantized().requires_grad_(False)
    copied = copy.deepcopy(layer).to(q.device)
    yield q.right(copied(q.x))
    yield same(layer.weight.dtype, torch.float32)
    yield q.right(layer.to(q.device)(q.x))


@program(kinds=BOTH)
def a_layer_shallowly(q: Quantized):
    """``copy.copy(layer)`` shares everything."""
    shallow = copy.copy(q.layer)
    yield q.right(shallow(q.x))
    yield same(shallow.weight is q.layer.weight, True)


@program(kinds=BOTH)
def a_parameter_shallowly(q: Quantized):
    """``copy.copy(weight)`` shares the codes and can take the place of the weight."""
    shallow = copy.copy(q.layer.weight)
    yield same(shallow.data_ptr() == q.layer.weight.data_ptr(), True)
    q.layer.weight = shallow
    yield q.right(q.layer(q.x))


@program(kinds=BOTH)
def a_parameter_deeply(q: Quantized):
    """``copy.deepcopy(weight)`` can take the place of the weight, and shares nothing."""
    deep = copy.deepcopy(q.layer.weight)
    q.layer.weight.data.zero_()
    q.layer.weight = deep
    yield q.right(q.layer(q.x))


@program(kinds=(*BOTH, "nf4-float-storage"), bias=True)
def a_layer_pickled(q: Quantized):
    """Through pickle and back, as to a worker process."""
    loaded = pickle.loads(pickle.dumps(q.layer))
    yield q.right(loaded(q.x))
    yield q.right(loaded.to(q.device)(q.x))


@program(kinds=BOTH)
def a_parameter_pickled(q: Quantized):
    """The parameter alone, put into the layer again."""
    q.layer.weight = pickle.loads(pickle.dumps(q.layer.weight))
    yield q.right(q.layer(q.x))


@program(kinds=("nf4", "int8"))
def a_float_layer_pickled(q: Quantized):
    """A layer that is not quantized yet is sent to the process that quantizes it."""
    layer = pickle.loads(pickle.dumps(q.unquantized().requires_grad_(False)))
    yield close(layer.to(q.device)(q.x), q.expected(), 0.2)


@program(kinds=BOTH)
def every_protocol(q: Quantized):
    """Pickles in all protocols."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        yield q.right(pickle.loads(pickle.dumps(q.layer, protocol=protocol))(q.x))


@program(kinds=NF4)
def a_quantization_state_copied(q: Quantized):
    """The state alone, deeply copied: dequantizing by it gives the weight."""
    state = copy.deepcopy(q.layer.weight.quant_state)
    yield close(dequantize_4bit(q.layer.weight.data, state), q.weight, 1e-6)


@program(kinds=BOTH, bias=True)
def parameters_cloned(q: Quantized):
    """``p.detach().clone()`` of every parameter is plain codes."""
    clones = {name: p.detach().clone() for name, p in q.layer.named_parameters()}
    yield same(clones["weight"].as_subclass(torch.Tensor), q.codes)
    clones["weight"].zero_()
    yield q.right(q.layer(q.x))


@program(kinds=BOTH, devices=["cpu"])
def shared_memory(q: Quantized):
    """``share_memory_()``, as for workers that infer."""
    q.layer.share_memory()
    yield same(q.layer.weight.is_shared(), True)
    yield q.right(q.layer(q.x))


@program(kinds=INT8)
def a_copy_keeps_its_scales(q: Quantized):
    """Codes and scales of a copy, multiplied by hand."""
    for copied in (copy.copy(q.layer.weight), copy.deepcopy(q.layer.weight)):
        yield close(copied.data.float() * copied.SCB[:, None] / 127, q.weight, 1e-6)


@program(bias=True)
def a_marked_parameter(q: Quantized):
    """A library leaves a mark on the parameter and looks for it on the layer's copy, or not at all."""
    q.layer.weight.my_mark = "frozen"
    yield same(q.layer.weight.my_mark, "frozen")
    yield q.right(copy.deepcopy(q.layer)(q.x))
    yield q.right(pickle.loads(pickle.dumps(q.layer))(q.x))
