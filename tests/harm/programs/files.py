"""``torch.save``, ``torch.load`` with and without ``weights_only``; written and read with and without the plugin."""

from __future__ import annotations

import io
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..catalogue import HANDOVER, program
from ..checks import same
from ..layers import BOTH, Quantized
from .state_dicts import snapshot

REFUSED = "Weights only load failed"
"""``Params4bit`` and ``QuantState`` are not among what torch unpickles by default."""


def files(**options: Any) -> Any:
    """A program that writes, hands over, and reads."""
    return program(**{"kinds": ("nf4-double", "int8"), "hands_over": True, **options})


def written(thing: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file, **options)
    file.seek(0)
    return file


def codes_of(thing: Any) -> torch.Tensor:
    return thing.detach().as_subclass(torch.Tensor)


@files(kinds=BOTH, may_raise=REFUSED, bias=True)
def named_parameters(q: Quantized):
    """``torch.save(dict(model.named_parameters()))``, read by default."""
    file = written(dict(q.layer.named_parameters()))
    yield HANDOVER
    loaded = torch.load(file)
    yield same(codes_of(loaded["weight"]), q.codes)
    yield same(codes_of(loaded["bias"]), q.bias)


@files(may_raise=REFUSED, bias=True)
def a_list_of_parameters(q: Quantized):
    """``torch.save(list(model.parameters()))``, read by default."""
    file = written(list(q.layer.parameters()))
    yield HANDOVER
    yield same(codes_of(torch.load(file)[0]), q.codes)


@files(may_raise=REFUSED)
def one_parameter(q: Quantized):
    """``torch.save(layer.weight)``, read by default."""
    file = written(q.layer.weight)
    yield HANDOVER
    yield same(codes_of(torch.load(file)), q.codes)


@files()
def data_of_a_parameter(q: Quantized):
    """``torch.save(layer.weight.data)``, read by default."""
    file = written(q.layer.weight.data)
    yield HANDOVER
    yield same(torch.load(file), q.codes)


@files(bias=True)
def a_state_dict(q: Quantized):
    """The usual checkpoint, read by default and into a layer of the same kind."""
    file = written(q.layer.state_dict())
    yield HANDOVER
    loaded = torch.load(file)
    yield same(loaded["weight"], q.codes)
    target = q.other()
    target.layer.load_state_dict(loaded, strict=False)
    yield q.right(target.layer(q.x))


@files(may_raise=REFUSED, bias=True)
def a_state_dict_with_variables(q: Quantized):
    """``state_dict(keep_vars=True)``, read by default."""
    file = written(q.layer.state_dict(keep_vars=True))
    yield HANDOVER
    yield same(codes_of(torch.load(file)["weight"]), q.codes)


@files(bias=True)
def a_state_dict_after_inference(q: Quantized):
    """The state dict of a layer that ran in eval."""
    with torch.no_grad():
        q.layer.eval()(q.x)
    file = written(q.layer.state_dict())
    yield HANDOVER
    yield same(torch.load(file)["weight"], q.codes)


@files(may_raise=REFUSED, kinds=("nf4", "int8", "int8-fp16"))
def float_parameters(q: Quantized):
    """Parameters of a layer that is not quantized yet, read by default."""
    layer = q.unquantized()
    file = written(dict(layer.named_parameters()))
    yield HANDOVER
    yield same(codes_of(torch.load(file)["weight"]), layer.weight.detach().as_subclass(torch.Tensor))


@files(kinds=BOTH, bias=True)
def a_whole_layer(q: Quantized):
    """``torch.save(model)``, read with ``weights_only=False``."""
    file = written(torch.nn.Sequential(q.layer))
    yield HANDOVER
    yield q.right(torch.load(file, weights_only=False)(q.x))


@files(bias=True)
def a_whole_layer_then_moved(q: Quantized):
    """The same, moved to the device that it is on and cast to its dtype, as loaders do."""
    file = written(q.layer)
    yield HANDOVER
    loaded = torch.load(file, weights_only=False).to(q.device)
    yield q.right(loaded(q.x))


@files(bias=True)
def a_pickled_layer(q: Quantized):
    """pickle in one process, unpickled in another."""
    data = pickle.dumps(q.layer)
    yield HANDOVER
    yield q.right(pickle.loads(data)(q.x))


@files(bias=True)
def a_pickled_layer_then_moved(q: Quantized):
    """The same, moved to the device that it is on, twice."""
    data = pickle.dumps(q.layer)
    yield HANDOVER
    loaded = pickle.loads(data).to(q.device)
    yield q.right(loaded(q.x))
    yield q.right(loaded.to(q.device)(q.x))


@files()
def a_pickled_parameter(q: Quantized):
    """The parameter alone, whose codes are read."""
    data = pickle.dumps(q.layer.weight)
    yield HANDOVER
    yield same(codes_of(pickle.loads(data)), q.codes)


@files(bias=True, devices=["cpu"])
def mapped_from_disk(q: Quantized):
    """``torch.load(mmap=True)`` of a state dict."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt"
        torch.save(q.layer.state_dict(), file)
        yield HANDOVER
        loaded = torch.load(file, mmap=True)
        yield same(loaded["weight"].clone(), q.codes)
        del loaded


@files(may_raise=REFUSED, bias=True)
def the_old_file_format(q: Quantized):
    """Parameters in the format from before zip files, read by default."""
    file = written(dict(q.layer.named_parameters()), _use_new_zipfile_serialization=False)
    yield HANDOVER
    yield same(codes_of(torch.load(file)["weight"]), q.codes)


@files(bias=True)
def a_training_checkpoint(q: Quantized):
    """Model, optimizer and step in one file, read by default, with a parameter on the way."""
    adapter = torch.nn.Linear(64, 2, device=q.device)
    optimizer = torch.optim.AdamW(adapter.parameters())
    adapter(q.layer(q.x)).sum().backward()
    optimizer.step()
    file = written({"model": snapshot(q.layer), "optimizer": optimizer.state_dict(), "step": 1})
    yield HANDOVER
    loaded = torch.load(file)
    yield same((loaded["step"], sorted(loaded["model"])), (1, sorted(q.layer.state_dict())))
    optimizer.load_state_dict(loaded["optimizer"])


@files(may_raise=REFUSED)
def a_parameter_of_a_batch(q: Quantized):
    """A parameter among plain tensors, as in a batch that goes through a queue."""
    file = written({"weight": q.layer.weight, "x": q.x})
    yield HANDOVER
    loaded = torch.load(file)
    yield same(codes_of(loaded["weight"]).float().mean() * loaded["x"].mean(), q.codes.float().mean() * q.x.mean())
