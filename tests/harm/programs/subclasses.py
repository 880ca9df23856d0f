"""Classes of the user's own, with constructors and methods of their own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

from ..catalogue import program
from ..checks import close, same
from ..layers import COLUMNS, INT8, ROWS, Quantized


class Named4bit(Params4bit):
    """A parameter that knows its name."""

    def __new__(cls, data: Any = None, *, label: str = "?", **options: Any) -> Named4bit:
        self = Params4bit.__new__(cls, data, **options)
        self.label = label
        return self


class Bare4bit(Params4bit):
    """A subclass that adds nothing."""


class NamedInt8(Int8Params):
    """An INT8 parameter with an argument of its own, and fewer than its base."""

    def __new__(cls, data: Any, label: str = "?", **options: Any) -> NamedInt8:
        self = Int8Params.__new__(cls, data, requires_grad=False, **options)
        self.label = label
        return self


class BareInt8(Int8Params):
    """A subclass that adds nothing."""


class Scaled4bit(Linear4bit):
    """A layer with another constructor, a buffer, and a forward around that of its base."""

    def __init__(self, columns: int, rows: int, factor: float) -> None:
        super().__init__(columns, rows, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


class ScaledInt8(Linear8bitLt):
    """The same for INT8."""

    def __init__(self, columns: int, rows: int, factor: float) -> None:
        super().__init__(columns, rows, bias=False, has_fp16_weights=False)
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


class Own4bit(Linear4bit):
    """A layer that loads, moves and sets attributes by methods of its own."""

    loaded = moved = 0

    def _load_from_state_dict(self, *args: Any) -> None:
        self.loaded += 1
        super()._load_from_state_dict(*args)

    def _apply(self, *args: Any, **kwargs: Any) -> Own4bit:
        self.moved += 1
        return super()._apply(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("last" if name == "first" else name, value)


class OwnInt8(Linear8bitLt):
    """The same for INT8."""

    loaded = moved = 0

    def _load_from_state_dict(self, *args: Any) -> None:
        self.loaded += 1
        super()._load_from_state_dict(*args)

    def _apply(self, *args: Any, **kwargs: Any) -> OwnInt8:
        self.moved += 1
        return super()._apply(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("last" if name == "first" else name, value)


def scaled(q: Quantized) -> torch.nn.Module:
    layer = (Scaled4bit if q.kind.cls is Linear4bit else ScaledInt8)(COLUMNS, ROWS, 2.0)
    layer.weight.data = q.unquantized().weight.data
    return layer.requires_grad_(False).to(q.device)


NF4_ONE = ("nf4-double",)
ONE_EACH = ("nf4-double", "int8")


@program(kinds=NF4_ONE)
def a_4bit_parameter_with_a_keyword(q: Quantized):
    """A subclass with a keyword of its own: copied deeply and shallowly."""
    weight = Named4bit(q.unquantized().weight.data, label="q_proj", requires_grad=False, quant_type="nf4")
    for made in (copy.copy(weight), copy.deepcopy(weight)):
        yield same(type(made), Named4bit)
        yield same(made.detach().as_subclass(torch.Tensor), weight.detach().as_subclass(torch.Tensor))


@program(kinds=NF4_ONE)
def a_4bit_parameter_with_a_keyword_pickled(q: Quantized):
    """The same through pickle; what comes back holds the numbers and the mark."""
    weight = Named4bit(q.unquantized().weight.data, label="q_proj", requires_grad=False, quant_type="nf4")
    made = pickle.loads(pickle.dumps(weight))
    yield same(made.detach().as_subclass(torch.Tensor), weight.detach().as_subclass(torch.Tensor))
    yield same(made.label, "q_proj")


@program(kinds=NF4_ONE)
def a_4bit_subclass_quantized(q: Quantized):
    """A subclass as the weight of a layer, moved and cut."""
    layer = q.unquantized()
    layer.weight = Bare4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=layer)
    yield q.right(layer.to(q.device)(q.x))
    yield same(sum(len(piece) for piece in torch.chunk(layer.weight, 2)), len(q.codes))
    yield q.right(pickle.loads(pickle.dumps(layer))(q.x))


@program(kinds=INT8)
def an_int8_parameter_with_an_argument(q: Quantized):
    """A subclass whose second argument is its own: copied deeply and shallowly."""
    weight = NamedInt8(q.unquantized().weight.data, "q_proj")
    made = copy.copy(weight)
    yield same(made.detach().as_subclass(torch.Tensor), weight.detach().as_subclass(torch.Tensor))
    yield same(made.label, "q_proj")


@program(kinds=INT8)
def an_int8_parameter_with_an_argument_pickled(q: Quantized):
    """The same through pickle."""
    weight = NamedInt8(q.unquantized().weight.data, "q_proj")
    made = pickle.loads(pickle.dumps(weight))
    yield same(made.detach().as_subclass(torch.Tensor), weight.detach().as_subclass(torch.Tensor))
    yield same(made.label, "q_proj")


@program(kinds=INT8)
def an_int8_parameter_with_an_argument_cut(q: Quantized):
    """The same in two pieces."""
    weight = NamedInt8(q.unquantized().weight.data, "q_proj")
    weight._quantize(q.device)
    for pieces in (weight.chunk(2), torch.split(weight, ROWS // 2)):
        yield same(torch.cat([p.detach().as_subclass(torch.Tensor) for p in pieces]), q.codes)


@program(kinds=INT8)
def an_int8_subclass_quantized(q: Quantized):
    """A subclass as the weight of a layer, moved and pickled."""
    layer = q.unquantized()
    layer.weight = BareInt8(layer.weight.data, requires_grad=False)
    yield q.right(layer.to(q.device)(q.x))
    yield q.right(pickle.loads(pickle.dumps(layer))(q.x))


@program(kinds=ONE_EACH)
def a_layer_with_another_constructor(q: Quantized):
    """Forward, deep copy, pickle."""
    layer = scaled(q)
    for made in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        yield close(made(q.x), 2 * q.expected(), q.tolerance)


@program(kinds=ONE_EACH)
def a_layer_with_another_constructor_cast(q: Quantized):
    """``half()`` and back."""
    layer = scaled(q).half()
    yield close(layer(q.x.half()).float(), 2 * q.expected(), 2e-2)
    yield same(layer.factor.dtype, torch.float16)


@program(kinds=ONE_EACH, may_raise="(?i)unexpected key|not supported")
def a_layer_with_another_constructor_saved(q: Quantized):
    """Its own state dict, with the buffer that it adds."""
    layer = scaled(q)
    saved = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    saved["factor"] = torch.tensor(3.0)
    layer.load_state_dict(saved)
    yield close(layer(q.x), 3 * q.expected(), q.tolerance)


@program(kinds=ONE_EACH)
def a_layer_with_methods_of_its_own(q: Quantized):
    """Overridden ``_apply``, ``_load_from_state_dict`` and ``__setattr__`` are called as before."""
    made = (Own4bit if q.kind.cls is Linear4bit else OwnInt8)(COLUMNS, ROWS, bias=False, **q.kind.options)
    made.load_state_dict({"weight": q.unquantized().weight.data})
    made.requires_grad_(False).to(q.device)
    made.first = 7
    yield same((made.loaded, made.moved, made.last, hasattr(made, "first")), (1, 1, 7, False))
    yield q.right(made(q.x))


@program(kinds=ONE_EACH)
def a_layer_without_its_constructor(q: Quantized):
    """A layer made by ``__new__`` and filled by its ``__dict__``, as some loaders do."""
    made = type(q.layer).__new__(type(q.layer))
    made.__dict__.update(q.layer.__dict__)
    yield q.right(made(q.x))


@program(kinds=ONE_EACH)
def a_class_patched_by_the_user(q: Quantized):
    """The user puts a method of his own on the instance."""
    original = q.layer.forward
    q.layer.forward = lambda x: -original(x)
    yield close(q.layer(q.x), -q.expected(), q.tolerance)
    del q.layer.forward
    yield q.right(q.layer(q.x))


@program(kinds=ONE_EACH)
def isinstance_and_names(q: Quantized):
    """Libraries ask for classes by ``isinstance`` and by name."""
    weight = q.layer.weight
    yield same(isinstance(weight, torch.nn.Parameter) and isinstance(q.layer, torch.nn.Linear), True)
    yield same(type(weight).__name__, "Params4bit" if q.kind.cls is Linear4bit else "Int8Params")
    yield same(type(weight).__module__, "bitsandbytes.nn.modules")
    yield same(type(q.layer).__name__, q.kind.cls.__name__)
    yield same((q.layer.in_features, q.layer.out_features), (COLUMNS, ROWS))
