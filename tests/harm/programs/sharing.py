"""Weights shared by modules, views of one storage, and what is freed when they go."""

from __future__ import annotations

import copy
import gc
import threading

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from torch.multiprocessing.reductions import StorageWeakRef

from ..catalogue import program
from ..checks import close, same
from ..counting import calls_of
from ..layers import BOTH, COLUMNS, INT8, NF4, ROWS, Quantized

PLAIN = "(?i)^$|quant|assert|shape|not initialized"


def in_one_storage(*layers: Quantized) -> torch.Tensor:
    """Make the codes of ``layers`` views of one tensor, as a checkpoint in one file is."""
    flat = torch.cat([each.codes.reshape(-1) for each in layers])
    start = 0
    for each in layers:
        stop = start + each.codes.numel()
        each.layer.weight.data = flat[start:stop].view(each.codes.shape)
        start = stop
    return flat


def with_its_scales(q: Quantized) -> torch.Tensor:
    """Put codes and scales of ``q`` into one storage, and return it."""
    state = q.layer.weight.quant_state
    raw = torch.empty(q.codes.nbytes + state.absmax.nbytes, dtype=torch.uint8, device=q.device)
    raw[: q.codes.nbytes] = q.codes.view(-1)
    scales = raw[q.codes.nbytes :].view(state.absmax.dtype)
    scales.copy_(state.absmax)
    q.layer.weight.data, state.absmax = raw[: q.codes.nbytes].view(-1, 1), scales
    return raw


@program(packs="too")
def one_weight_in_two_layers(q: Quantized):
    """Two layers share a parameter, and both compute."""
    second = q.unquantized()
    second.weight = q.layer.weight
    for layer in (second, q.layer, second.eval(), q.layer.eval()):
        with torch.no_grad():
            yield q.right(layer(q.x))


@program(packs="too", may_raise="(?i)unexpected key|not supported")
def one_weight_in_two_layers_saved(q: Quantized):
    """The model of both, saved and loaded into one that is tied too."""
    second = q.unquantized()
    second.weight = q.layer.weight
    tied = torch.nn.ModuleList([q.layer, second])
    new = q.other()
    other = new.unquantized()
    other.weight = new.layer.weight
    target = torch.nn.ModuleList([new.layer, other])
    target.load_state_dict({name: t.clone() for name, t in tied.state_dict().items()})
    for layer in target:
        yield q.right(layer(q.x))


@program(kinds=BOTH, packs="too")
def one_layer_twice_in_a_model(q: Quantized):
    """The same module at two places."""
    square = q.other(rows=COLUMNS)
    model = torch.nn.Sequential(square.layer, torch.nn.Tanh(), square.layer)
    yield close(model(q.x), square.expected(square.expected().tanh()), max(q.tolerance, 1e-5), q.rounding)
    yield same(len(list(model.parameters())), 1)
    copied = copy.deepcopy(model)
    yield same(copied[0] is copied[2], True)
    yield close(copied(q.x), square.expected(square.expected().tanh()), max(q.tolerance, 1e-5), q.rounding)


@program(kinds=("nf4", "int8"), may_raise=PLAIN)
def a_head_tied_to_an_embedding(q: Quantized):
    """``lm_head.weight = embedding.weight``, which is not quantized."""
    embedding = torch.nn.Embedding(ROWS, COLUMNS, device=q.device)
    q.layer.weight = embedding.weight
    yield close(q.layer(q.x), q.x @ embedding.weight.detach().T, q.tolerance)
    yield same(embedding.weight.dtype, torch.float32)


@program(kinds=(*BOTH,), packs="too")
def views_of_one_storage(q: Quantized):
    """Three layers whose codes lie in one tensor."""
    layers = [q, q.other(1), q.other(2)]
    in_one_storage(*layers)
    with torch.no_grad():
        for _ in range(2):
            for each in layers:
                yield each.right(each.layer.eval()(q.x))


@program(kinds=BOTH)
def views_of_one_storage_in_training(q: Quantized):
    """The same, trained through."""
    layers = [q, q.other(1)]
    in_one_storage(*layers)
    x = q.inputs(grad=True)
    sum(each.layer(x).sum() for each in layers).backward()
    yield close(x.grad, sum(each.weight.sum(0) for each in layers).expand(4, -1), 1e-3)


@program(kinds=NF4, packs="only", when="bitsandbytes>=0.49")
def views_of_one_storage_repacked_once(q: Quantized):
    """What the kernel needs is made once for each layer, not again whenever another one of the storage ran."""
    layers = [q, q.other(1), q.other(2), q.other(3)]
    in_one_storage(*layers)
    with torch.no_grad(), calls_of(functional._convert_weight_packed_for_cpu) as packed:
        for _ in range(3):
            for each in layers:
                each.layer.eval()(q.x[:1])
    yield same(packed[0] <= len(layers), True)


@program(kinds=("nf4",), packs="too")
def codes_and_scales_in_one_storage(q: Quantized):
    """One buffer holds everything of a layer, as a kernel's author lays it out."""
    with_its_scales(q)
    with torch.no_grad():
        yield q.right(q.layer.eval()(q.x))
        yield q.right(q.layer.eval()(q.x))


@program(kinds=("nf4",), packs="too")
def freed_with_codes_and_scales_in_one_storage(q: Quantized):
    """When such a layer goes, its memory does."""
    raw = with_its_scales(q)
    storage = StorageWeakRef(raw.untyped_storage())
    with torch.no_grad():
        q.layer.eval()(q.x)
    q.layer = None
    del raw
    gc.collect()
    yield same(storage.expired(), True)


@program(packs="too")
def freed_with_its_layer(q: Quantized):
    """The memory of the codes goes with the layer, after inference and after training."""
    x = q.inputs(grad=True)
    q.layer(x).sum().backward()
    with torch.no_grad():
        q.layer.eval()(q.x)
    storage = StorageWeakRef(q.layer.weight.untyped_storage())
    q.layer = None
    gc.collect()
    yield same(storage.expired(), True)


@program(kinds=BOTH)
def freed_between_forward_and_backward(q: Quantized):
    """A graph that is dropped without a backward holds nothing."""
    y = q.layer(q.inputs(grad=True))
    storage = StorageWeakRef(q.layer.weight.untyped_storage())
    del y
    q.layer = None
    gc.collect()
    yield same(storage.expired(), True)


def in_threads(q: Quantized, count: int = 4) -> list[torch.Tensor | Exception]:
    """What ``count`` threads get from one forward each."""
    results: list[torch.Tensor | Exception] = []
    start = threading.Barrier(count)

    def work() -> None:
        start.wait()
        try:
            with torch.no_grad():
                results.append(q.layer(q.x))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@program(packs="too")
def by_several_threads(q: Quantized):
    """A server's threads share a layer that has settled."""
    q.layer.eval()
    with torch.no_grad():
        expected = q.layer(q.x)
    yield q.right(expected)
    yield same(all(torch.equal(y, expected) for y in in_threads(q)), True)


@program(kinds=INT8)
def one_int8_weight_in_two_layers_after_one_ran(q: Quantized):
    """The second layer gets the weight after the first has run with it."""
    q.layer.eval()(q.x)
    second = Linear8bitLt(COLUMNS, ROWS, bias=False, has_fp16_weights=False)
    second.weight = q.layer.weight
    yield q.right(second.eval()(q.x))


@program(kinds=NF4)
def a_state_shared_by_two_weights(q: Quantized):
    """Two parameters with one quantization state: a clone of the codes, and the original."""
    second = Linear4bit(COLUMNS, ROWS, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    second.weight = type(q.layer.weight)(
        q.codes.clone(), requires_grad=False, quant_state=q.layer.weight.quant_state, bnb_quantized=True
    )
    yield q.right(second(q.x))
    second.weight.data.zero_()
    yield q.right(q.layer(q.x))
