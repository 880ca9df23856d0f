"""``load_state_dict`` in all its forms."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from ..catalogue import program
from ..checks import close, same
from ..layers import BOTH, COLUMNS, INT8, NF4, ROWS, Quantized

REFUSED = "(?i)size mismatch|must match|missing|without its row scales|unexpected|lacks|not supported|not quantized|no 'SCB'|the layer is quantized|has no|has, un"


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@program(bias=True)
def its_own_parameters(q: Quantized):
    """A backup by ``named_parameters``, as by an average of weights, and back."""
    backup = {name: p.detach().clone() for name, p in q.layer.named_parameters()}
    q.layer.load_state_dict(backup)
    yield q.right(q.layer(q.x))


@program(bias=True)
def its_own_parameters_not_strict(q: Quantized):
    """The same with ``strict=False``."""
    backup = {name: p.detach().clone() for name, p in q.layer.named_parameters()}
    missing, unexpected = q.layer.load_state_dict(backup, strict=False)
    yield same(unexpected, [])
    yield q.right(q.layer(q.x))


@program(bias=True)
def its_own_parameters_in_a_model(q: Quantized):
    """The same for a model of two layers and a norm, after it ran."""
    model = torch.nn.Sequential(q.layer, torch.nn.LayerNorm(ROWS, device=q.device))
    before = model(q.x)
    model.load_state_dict({name: p.clone() for name, p in model.named_parameters()})
    yield close(model(q.x), before, 0)


@program()
def its_own_parameters_themselves(q: Quantized):
    """The very parameters, not copies."""
    q.layer.load_state_dict(dict(q.layer.named_parameters()), strict=False)
    yield q.right(q.layer(q.x))


@program(bias=True, may_raise=REFUSED)
def its_own_state_dict(q: Quantized):
    """Saved and loaded before any forward, after one, and after an evaluation."""
    for prepare in (lambda: None, lambda: q.layer(q.x), lambda: q.layer.eval()(q.x)):
        prepare()
        q.layer.load_state_dict(snapshot(q.layer))
        yield q.right(q.layer(q.x))


@program(bias=True)
def the_best_of_a_run(q: Quantized):
    """``best = deepcopy(model.state_dict())``, an adapter trains, and the best comes back."""
    adapter = torch.nn.Linear(ROWS, ROWS, device=q.device)
    model = torch.nn.Sequential(q.layer, adapter)
    best, before = copy.deepcopy(model.state_dict()), model(q.x).detach()
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
    model(q.x).square().sum().backward()
    optimizer.step()
    model.load_state_dict(best)
    yield close(model(q.x), before, 0)


@program(bias=True, may_raise=REFUSED)
def that_of_another_layer(q: Quantized):
    """The state dict of one quantized layer goes into another."""
    q.other().layer.load_state_dict(snapshot(q.layer))
    target = q.other()
    target.layer.load_state_dict(snapshot(q.layer))
    yield q.right(target.layer(q.x))


@program(bias=True, may_raise=REFUSED)
def that_of_another_layer_not_strict(q: Quantized):
    """The same with ``strict=False``."""
    target = q.other()
    target.layer.load_state_dict(snapshot(q.layer), strict=False)
    yield q.right(target.layer(q.x))


@program(bias=True, may_raise=REFUSED)
def assigned(q: Quantized):
    """``assign=True``."""
    target = q.other()
    target.layer.load_state_dict(snapshot(q.layer), assign=True)
    yield q.right(target.layer(q.x))


@program(bias=True, may_raise=REFUSED)
def assigned_to_a_layer_on_meta(q: Quantized):
    """A layer is built without memory and given tensors with ``assign=True``."""
    with torch.device("meta"):
        layer = type(q.layer)(COLUMNS, ROWS, **q.kind.options)
    layer.load_state_dict(snapshot(q.layer), assign=True)
    yield q.right(layer.requires_grad_(False).to(q.device)(q.x))


@program(bias=True)
def the_bias_alone(q: Quantized):
    """A partial state dict: what it does not name stays."""
    q.layer.load_state_dict({"bias": torch.ones(ROWS)}, strict=False)
    q.bias = torch.ones(ROWS, device=q.device)
    yield q.right(q.layer(q.x))


@program(bias=True)
def adapters_alone(q: Quantized):
    """A model of a quantized layer and an adapter loads a state dict of the adapter."""
    model = torch.nn.ModuleDict({"base": q.layer, "adapter": torch.nn.Linear(ROWS, 2, device=q.device)})
    missing, unexpected = model.load_state_dict({"adapter.weight": torch.ones(2, ROWS)}, strict=False)
    yield same(unexpected, [])
    yield same(float(model["adapter"].weight.sum()), 2.0 * ROWS)
    yield q.right(model["base"](q.x))


@program(kinds=(*BOTH, "int8-fp16"), bias=True)
def from_a_plain_layer_then_quantized(q: Quantized):
    """The way of the manual: float weights into the new layer, then onto the device."""
    linear = torch.nn.Linear(COLUMNS, ROWS)
    layer = q.unquantized(bias=True)
    layer.load_state_dict(linear.state_dict())
    y = layer.requires_grad_(False).to(q.device)(q.x)
    yield close(y, linear.to(q.device)(q.x), 0.2)


@program(bias=True, may_raise=f"{REFUSED}|expected packed INT8")
def from_a_plain_layer_into_a_quantized_one(q: Quantized):
    """Float weights into a layer that is quantized already: not what it holds."""
    linear = torch.nn.Linear(COLUMNS, ROWS)
    q.layer.load_state_dict(linear.state_dict())
    yield close(q.layer(q.x), linear.to(q.device)(q.x), 0.2)


@program(bias=True, may_raise=REFUSED)
def of_another_shape(q: Quantized):
    """A checkpoint of a model with other sizes must be refused."""
    q.layer.load_state_dict(snapshot(q.other(rows=2 * ROWS).layer))
    yield q.right(q.layer(q.x))


@program(bias=True, may_raise=REFUSED)
def codes_of_another_layer_alone(q: Quantized):
    """Codes without their statistics are no weight: nothing right can come of them but an error."""
    q.layer.load_state_dict({"weight": q.other().codes}, strict=False)
    yield q.other().right(q.layer(q.x))


@program(kinds=NF4, bias=True)
def the_statistics_in_another_dtype(q: Quantized):
    """A checkpoint whose floating point entries were cast to save space."""
    cast = {n: t.bfloat16() if t.dtype == torch.float32 and n != "bias" else t for n, t in snapshot(q.layer).items()}
    q.layer.load_state_dict(cast, strict=False)
    yield close(q.layer(q.x), q.expected(), 2e-2, rounding="unpatched, the statistics of the file are ignored")


@program(bias=True)
def through_safetensors(q: Quantized):
    """Saved by safetensors and loaded into a layer like it."""
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in snapshot(q.layer).items()}, file)
        loaded = load_file(file)
    yield same(sorted(loaded), sorted(q.layer.state_dict()))
    yield same(loaded["weight"], q.codes)
    target = q.other()
    target.layer.load_state_dict(loaded)
    yield q.right(target.layer(q.x))


@program(bias=True)
def names_and_prefixes(q: Quantized):
    """What the state dict holds, at the top and inside a model."""
    own = q.layer.state_dict()
    inside = torch.nn.Sequential(torch.nn.Identity(), q.layer).state_dict()
    yield same(sorted(inside), sorted(f"1.{name}" for name in own))
    yield same(sorted(n for n, _ in q.layer.named_parameters()), ["bias", "weight"])
    yield same([n for n, _ in q.layer.named_buffers()], [])
    yield same(own["weight"], q.codes)


@program(bias=True)
def kept_variables(q: Quantized):
    """``state_dict(keep_vars=True)`` gives the parameters themselves."""
    kept = q.layer.state_dict(keep_vars=True)
    yield same(kept["weight"] is q.layer.weight and kept["bias"] is q.layer.bias, True)


@program(kinds=INT8, bias=True)
def int8_parameters_after_a_forward(q: Quantized):
    """The parameters of an INT8 layer that ran, back into it."""
    q.layer.eval()(q.x)
    q.layer.load_state_dict({name: p.detach().clone() for name, p in q.layer.named_parameters()}, strict=False)
    yield q.right(q.layer(q.x))


@program(kinds=BOTH, bias=True)
def checkpointed_by_dcp(q: Quantized):
    """``get_model_state_dict`` and ``set_model_state_dict`` of a model that is not sharded."""
    model = torch.nn.Sequential(q.layer)
    saved = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    yield same(saved["0.weight"].as_subclass(torch.Tensor), q.codes)
    set_model_state_dict(model, saved)
    yield q.right(model(q.x))


@program(bias=True)
def a_hook_that_renames(q: Quantized):
    """A state dict hook of the user's own renames an entry, and a pre-hook names it back."""

    def rename(module: object, state: dict, prefix: str, *_: object) -> None:
        state[prefix + "offset_"] = state.pop(prefix + "bias")

    def back(state: dict, prefix: str, *_: object) -> None:
        state[prefix + "bias"] = state.pop(prefix + "offset_")

    q.layer._register_state_dict_hook(rename)
    q.layer._register_load_state_dict_pre_hook(back)
    saved = q.layer.state_dict()
    yield same("offset_" in saved and "bias" not in saved, True)
    q.layer.load_state_dict(saved)
    yield q.right(q.layer(q.x))
