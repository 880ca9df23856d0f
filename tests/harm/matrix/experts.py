"""Quantized experts as a row of the matrix: what users do to a parameter of three dimensions, and what then reads it.

There is no such layer without the plugin. So the reference is the same program on the same numbers in a parameter in
floating point: quantized experts give what it gives, or an error that says what they are. Where the program has no result in
floating point either, they may have none.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from patches.experts.quantize import QuantizationConfig, split_and_quantize_experts
from patches.experts.tensor import as_parameter

from .subject import four_bits, nested_scales

EXPERTS, ROWS, COLUMNS = 4, 32, 64
KINDS = {
    "nf4": QuantizationConfig("nf4", False, torch.uint8),
    "nf4-nested": QuantizationConfig("nf4", True, torch.uint8),
    "fp4-stored-bf16": QuantizationConfig("fp4", False, torch.bfloat16),
    "int8": QuantizationConfig("int8", False, torch.int8, 6.0),
}


class Layer(nn.Module):
    def __init__(self, w: nn.Parameter) -> None:
        super().__init__()
        self.w = w

    def forward(self, x: torch.Tensor, chosen: int = 1) -> torch.Tensor:
        return linear(x, self.w[chosen])


class Pair(NamedTuple):
    """The layer of a user, and another one of the same kind with other numbers."""

    layer: Layer
    other: Layer


def quantized(kind: str) -> Pair:
    return Pair(*(Layer(as_parameter(_packed(kind, seed))) for seed in (0, 1)))


def plain(kind: str) -> Pair:
    """The same numbers in floating point, by arithmetic of the test."""
    layers = (Layer(nn.Parameter(_values(_packed(kind, seed)), requires_grad=False)) for seed in (0, 1))
    return Pair(*layers)


@functools.cache
def _made(kind: str, seed: int) -> Any:
    weight = torch.randn(EXPERTS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) / 8
    return split_and_quantize_experts(weight, 2, KINDS[kind])


def _packed(kind: str, seed: int) -> Any:
    return _made(kind, seed).map_tensors(torch.clone)


def _values(held: Any) -> torch.Tensor:
    found = []
    for expert in range(EXPERTS):
        matrices = []
        for part in held.parts:
            codes, absmax = part.codes[expert], part.absmax[expert]
            if held.kind.int8:
                matrices.append(codes.float() * absmax[:, None] / 127)
                continue
            if part.nested_absmax is not None:
                absmax = nested_scales(absmax, held.nested_code, part.nested_absmax[expert], 256, part.offset[expert])
            matrices.append(four_bits(codes, held.code, part.shape, held.kind.blocksize, absmax))
        found.append(torch.cat(matrices))
    return torch.stack(found)


# -- what users do ---------------------------------------------------------------------------------

Change = Callable[[Pair], Any]
CHANGES: dict[str, Change] = {}


def change(body: Change) -> Change:
    CHANGES[body.__name__] = body
    return body


def _each(name: str, body: Change) -> None:
    CHANGES[name] = body


def _set(p: Pair, value: torch.Tensor) -> None:
    p.layer.w = nn.Parameter(value, requires_grad=False)


_each("nothing", lambda p: None)
_each("data_of_another", lambda p: setattr(p.layer.w, "data", p.other.w.data))
_each("parameter_of_another", lambda p: setattr(p.layer, "w", p.other.w))
_each("deepcopied_parameter", lambda p: setattr(p.layer, "w", copy.deepcopy(p.layer.w)))
_each("pickled_parameter", lambda p: setattr(p.layer, "w", pickle.loads(pickle.dumps(p.layer.w))))
_each("detached", lambda p: _set(p, p.layer.w.detach()))
_each("cloned", lambda p: _set(p, p.layer.w.clone()))
_each("contiguous", lambda p: _set(p, p.layer.w.contiguous()))
_each("to_bf16", lambda p: _set(p, p.layer.w.to(torch.bfloat16)))
_each("half", lambda p: p.layer.half())
_each("bf16_and_back", lambda p: p.layer.bfloat16().float())
_each("double", lambda p: p.layer.double())
_each("type_of_tensor", lambda p: p.layer.type(torch.float16))
_each("applied", lambda p: p.layer._apply(lambda t: t))
_each("loaded", lambda p: p.layer.load_state_dict(p.other.state_dict()))
_each("loaded_copy", lambda p: p.layer.load_state_dict(copy.deepcopy(p.other.state_dict())))
_each("loaded_assign", lambda p: p.layer.load_state_dict(p.other.state_dict(), assign=True))
_each("loaded_strictly_empty", lambda p: p.layer.load_state_dict({}))
_each("loaded_other_shape", lambda p: p.layer.load_state_dict({"w": torch.ones(2, 3, 4)}))
_each("copied_into", lambda p: p.layer.w.copy_(p.other.w))
_each("data_copied_into", lambda p: p.layer.w.data.copy_(p.other.w.data))
_each("added_in_place", lambda p: p.layer.w.data.add_(1))
_each("scaled_in_place", lambda p: p.layer.w.data.mul_(2))
_each("expert_zeroed", lambda p: p.layer.w.data[1].zero_())
_each("expert_assigned", lambda p: p.layer.w.data.__setitem__(1, torch.ones(ROWS, COLUMNS)))
_each("initialized", lambda p: nn.init.zeros_(p.layer.w))
_each("filled_by_index", lambda p: p.layer.w.data.index_fill_(0, torch.tensor([1]), 0.5))
_each("scaled", lambda p: _set(p, p.layer.w * 2))
_each("half_of_the_experts", lambda p: _set(p, p.layer.w[1:3]))
_each("reordered", lambda p: _set(p, p.layer.w[torch.tensor([2, 0, 1, 3])]))
_each("transposed_twice", lambda p: _set(p, p.layer.w.mT.mT))
_each("two_layers_in_one", lambda p: _set(p, torch.cat([p.layer.w, p.other.w])))
_each("in_the_mean", lambda p: _set(p, p.layer.w.lerp(p.other.w, 0.5)))
_each("no_gradient", lambda p: p.layer.requires_grad_(False))
_each("parametrized", lambda p: nn.utils.parametrize.register_parametrization(p.layer, "w", nn.Identity()))


@change
def to_meta_and_loaded(p: Pair) -> None:
    p.layer.to("meta").to_empty(device="cpu").load_state_dict(p.other.state_dict())


@change
def swapped(p: Pair) -> None:
    torch.utils.swap_tensors(p.layer.w, p.other.w)


@change
def averaged_model(p: Pair) -> None:
    p.layer.w = torch.optim.swa_utils.AveragedModel(p.layer).module.w


@change
def saved_and_loaded(p: Pair) -> None:
    file = io.BytesIO()
    torch.save(p.other.state_dict(), file)
    file.seek(0)
    p.layer.load_state_dict(torch.load(file, weights_only=True))


@change
def saved_whole(p: Pair) -> None:
    file = io.BytesIO()
    torch.save(p.layer, file)
    file.seek(0)
    p.layer.w = torch.load(file, weights_only=False).w


@change
def read_as_a_vector(p: Pair) -> None:
    _set(p, nn.utils.parameters_to_vector(p.layer.parameters()).view(EXPERTS, ROWS, COLUMNS))


@change
def written_from_a_vector(p: Pair) -> None:
    nn.utils.vector_to_parameters(torch.ones(EXPERTS * ROWS * COLUMNS), p.layer.parameters())


# -- what reads --------------------------------------------------------------------------------------

Reader = Callable[[Layer], Any]
READERS: dict[str, Reader] = {}


def _reads(name: str, body: Reader) -> None:
    READERS[name] = body


def reader(body: Reader) -> Reader:
    READERS[body.__name__] = body
    return body


def _x(layer: Layer, *shape: int) -> torch.Tensor:
    shape = shape or (5, COLUMNS)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(layer.w.dtype)


_reads("forward", lambda m: m(_x(m)))
_reads("forward_3d", lambda m: m(_x(m, 2, 3, COLUMNS)))
_reads("forward_bias", lambda m: linear(_x(m), m.w[1], torch.ones(m.w.shape[1], dtype=m.w.dtype)))
_reads("forward_one_row", lambda m: m(_x(m, COLUMNS)))
_reads("forward_no_rows", lambda m: m(_x(m, 0, COLUMNS)))
_reads("forward_by_number", lambda m: linear(_x(m), m.w[torch.tensor(1)]))
_reads("last_expert", lambda m: m(_x(m), -1))
_reads("no_such_expert", lambda m: m(_x(m), 9))
_reads("product_from_the_left", lambda m: m.w[1] @ _x(m, COLUMNS, 3))
_reads("product_of_rows", lambda m: _x(m, 3, ROWS) @ m.w[1])
_reads("product_transposed", lambda m: _x(m) @ m.w[1].t())
_reads("product_with_a_vector", lambda m: m.w[1] @ _x(m, COLUMNS))
_reads("all_at_once", lambda m: torch.bmm(_x(m, len(m.w), 3, COLUMNS), m.w.transpose(1, 2)))
_reads("broadcast", lambda m: _x(m, 3, COLUMNS) @ m.w.mT)
_reads("einsum", lambda m: torch.einsum("td,erd->ter", _x(m), m.w))
_reads("chosen", lambda m: torch.bmm(m.w[torch.tensor([1, 0, 1])], _x(m, 3, COLUMNS, 1)))
_reads("chosen_rows", lambda m: torch.bmm(_x(m, 3, 1, COLUMNS), m.w[torch.tensor([1, 0, 1])].mT))
_reads("chosen_in_two_dimensions", lambda m: m.w[torch.tensor([[1, 0], [0, 1]])] * 1)
_reads("chosen_by_list", lambda m: m.w[[1, 0]] * 1)
_reads("chosen_by_mask", lambda m: m.w[torch.arange(len(m.w)) == 1] * 1)
_reads("index_select", lambda m: m.w.index_select(0, torch.tensor([1, 0])) * 1)
_reads("rows_of_an_expert", lambda m: m.w[1, 2:9] * 1)
_reads("one_number", lambda m: m.w[1, 2, 3] * 1)
_reads("last_dimension", lambda m: m.w[..., 5] * 1)
_reads("gate_and_up", lambda m: torch.cat(m.w.chunk(2, dim=1), dim=2))
_reads("gate_of_an_expert", lambda m: linear(_x(m), m.w[1].chunk(2)[0]))
_reads("unbound", lambda m: torch.stack([linear(_x(m), expert) for expert in m.w.unbind(0)]))
_reads("iterated", lambda m: torch.stack([linear(_x(m), expert) for expert in m.w]))
_reads("split", lambda m: torch.stack([linear(_x(m), part[0]) for part in m.w.split(1)]))
_reads("plus_one", lambda m: m.w + 1)
_reads("norm", lambda m: m.w.norm())
_reads("mean_by_expert", lambda m: m.w.mean((1, 2)))
_reads("finite", lambda m: torch.isfinite(m.w).all())
_reads("equal_to_itself", lambda m: torch.tensor(torch.equal(m.w, m.w)))
_reads("flattened", lambda m: m.w.flatten() * 1)
_reads("joined_rows", lambda m: linear(_x(m), m.w.reshape(-1, m.w.shape[-1])))
_reads("more_dimensions", lambda m: m.w.unsqueeze(0) * 1)
_reads("repeated", lambda m: m.w.repeat(2, 1, 1))
_reads("list", lambda m: torch.tensor(m.w.tolist()))
_reads("item", lambda m: torch.tensor(m.w[1, 2, 3].item()))
_reads("numpy", lambda m: torch.from_numpy(m.w.numpy()))
_reads("float", lambda m: m.w.float() * 1)
_reads("zeros_like", lambda m: torch.zeros_like(m.w))
_reads("ones_like", lambda m: torch.ones_like(m.w))
_reads("shape", lambda m: torch.tensor([*m.w.shape, m.w.numel(), m.w.dim(), *m.w.stride()]))
_reads("deepcopy", lambda m: copy.deepcopy(m)(_x(m)))
_reads("functional_call", lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (_x(m),)))
_reads("state_dict", lambda m: next(iter(m.state_dict().values())) * 1)
_reads("vmap", lambda m: torch.vmap(lambda x: linear(x, m.w[1]))(_x(m, 3, 2, COLUMNS)))
_reads("vmap_over_experts", lambda m: torch.vmap(lambda w: linear(_x(m), w))(m.w))
_reads("printed", lambda m: torch.tensor(len(repr(m.w)) > 0))
_reads("shared", lambda m: m.w.share_memory_() * 1)


@reader
def backward(m: Layer) -> Any:
    x = _x(m).requires_grad_()
    (m(x).float() ** 2).sum().backward()
    return x.grad


@reader
def backward_checkpointed(m: Layer) -> Any:
    x = _x(m).requires_grad_()
    torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False).float().sum().backward()
    return x.grad


@reader
def backward_twice(m: Layer) -> Any:
    x = _x(m).requires_grad_()
    (grad,) = torch.autograd.grad((m(x).float() ** 2).sum(), x, create_graph=True)
    return torch.autograd.grad(grad.float().sum(), x)[0]


@reader
def autocast(m: Layer) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return m(_x(m).float())


@reader
def inference(m: Layer) -> Any:
    with torch.inference_mode():
        return m(_x(m))


@reader
def grouped(m: Layer) -> Any:
    ends = torch.tensor([2, *[6] * (len(m.w) - 1)], dtype=torch.int32)
    return torch.nn.functional.grouped_mm(_x(m, 6, COLUMNS).bfloat16(), m.w.bfloat16().mT, offs=ends)


@reader
def added_to(m: Layer) -> Any:
    """An average of weights that another tensor keeps."""
    return torch.ones(m.w.shape, dtype=m.w.dtype).lerp_(m.w.detach(), 0.5)
