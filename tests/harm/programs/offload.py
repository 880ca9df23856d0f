"""accelerate's hooks: layers offloaded to the CPU or the disk, quantized, not yet quantized, and never."""

from __future__ import annotations

import tempfile

import torch
from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.utils import set_module_tensor_to_device
from bitsandbytes import functional

from ..catalogue import program
from ..checks import close, same
from ..counting import calls_of
from ..layers import BOTH, COLUMNS, NF4, ROWS, Quantized, random

META = "(?i)meta|device|SCB|scales|quantiz|accelerator"


def through(q: Quantized, model: torch.nn.Module, times: int = 2):
    """The output of ``model``, which has ``q.layer`` first and an identity after it, ``times`` over."""
    with torch.no_grad():
        for _ in range(times):
            yield q.right(model(q.x))


@program(may_raise=META, packs="too")
def to_the_cpu(q: Quantized):
    """``cpu_offload``, two forwards in eval."""
    model = torch.nn.Sequential(q.layer).eval()
    cpu_offload(model, execution_device=q.device)
    yield from through(q, model)


@program(may_raise=META, packs="too", devices=["cpu"])
def to_the_disk(q: Quantized):
    """``disk_offload``, two forwards in eval."""
    model = torch.nn.Sequential(q.layer).eval()
    with tempfile.TemporaryDirectory() as folder:
        disk_offload(model, folder, execution_device=q.device)
        yield from through(q, model)


@program(may_raise=META, bias=True)
def to_the_cpu_and_trained_through(q: Quantized):
    """An offloaded layer in training: forward and backward, twice."""
    model = torch.nn.Sequential(q.layer)
    cpu_offload(model, execution_device=q.device)
    for _ in range(2):
        x = q.inputs(grad=True)
        y = model(x)
        yield q.right(y, x)
        y.sum().backward()
        yield q.gradient(x)


@program(may_raise=META, devices=["cpu"])
def dispatched_over_cpu_and_disk(q: Quantized):
    """``dispatch_model`` with a map of CPU and disk."""
    second = q.other(columns=ROWS)
    model = torch.nn.Sequential(q.layer, second.layer).eval()
    expected = second.expected(q.expected())
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=folder, force_hooks=True)
        for _ in range(2):
            yield close(model(q.x), expected, 2 * q.tolerance)


@program(may_raise=META)
def hooks_put_on_and_taken_off(q: Quantized):
    """Offloaded, run, and brought back for good."""
    model = torch.nn.Sequential(q.layer).eval()
    cpu_offload(model, execution_device=q.device)
    yield from through(q, model, times=1)
    remove_hook_from_submodules(model)
    with torch.no_grad():
        yield q.right(model.to(q.device)(q.x))


@program(bias=True)
def a_hook_that_moves_nothing(q: Quantized):
    """``AlignDevicesHook`` without offload moves inputs only."""
    add_hook_to_module(q.layer, AlignDevicesHook(q.device, io_same_device=True))
    yield from through(q, q.layer)


@program()
def a_user_hook(q: Quantized):
    """``cpu_offload_with_hook``: the model is moved whole, back and forth."""
    model, hook = cpu_offload_with_hook(torch.nn.Sequential(q.layer).eval(), q.device)
    yield from through(q, model)
    hook.offload()
    yield from through(q, model)


@program()
def put_on_its_device(q: Quantized):
    """``set_module_tensor_to_device`` with the tensor that is there."""
    set_module_tensor_to_device(q.layer, "weight", q.device)
    yield q.right(q.layer(q.x))


@program(kinds=("nf4", "int8"), may_raise=META)
def put_on_its_device_before_it_is_quantized(q: Quantized):
    """The same with a layer that is not quantized yet, whose value is handed over: it is quantized there."""
    layer = q.unquantized().requires_grad_(False)
    set_module_tensor_to_device(layer, "weight", q.device, value=q.unquantized().weight.data)
    yield q.right(layer(q.x))


@program(may_raise=META)
def next_to_layers_that_are_never_quantized(q: Quantized):
    """A quantized layer between plain ones, all offloaded."""
    first, last = torch.nn.Linear(COLUMNS, COLUMNS), torch.nn.Linear(ROWS, 2)
    model = torch.nn.Sequential(first, q.layer, last).to(q.device).eval()
    with torch.no_grad():
        expected = last(q.expected(first(q.x)))
        cpu_offload(model, execution_device=q.device)
        for _ in range(2):
            yield close(model(q.x), expected, 2 * q.tolerance, q.rounding)


def never_quantized(q: Quantized, columns: int = COLUMNS, train: bool = True):
    """A layer with float weights is offloaded and runs twice."""
    layer = q.unquantized(columns=columns).requires_grad_(False).train(train)
    expected, x = layer.weight.data.clone().to(q.device), random(4, columns, seed=7, device=q.device)
    cpu_offload(layer, execution_device=q.device)
    with torch.no_grad():
        for _ in range(2):
            yield close(layer(x), x @ expected.T, 0.2, q.rounding)


SHAPES = "(?i)meta|quantiz|shape|size"


@program(kinds=("nf4", "nf4-double", "int8"), may_raise=SHAPES)
def not_quantized_before_it_is_offloaded(q: Quantized):
    """Hooks come before ``.to(device)``: each forward brings the float weights in anew."""
    yield from never_quantized(q)


@program(kinds=("nf4", "nf4-double"), packs="too", may_raise=SHAPES)
def not_quantized_before_it_is_offloaded_in_eval(q: Quantized):
    """The same in eval."""
    yield from never_quantized(q, train=False)


@program(kinds=("nf4",), may_raise=SHAPES)
def not_quantized_before_it_is_offloaded_and_odd(q: Quantized):
    """The same with 63 input features."""
    yield from never_quantized(q, columns=63)


@program(kinds=NF4, packs="only", when="bitsandbytes>=0.49", may_raise=META)
def repacked_from_the_disk(q: Quantized):
    """A layer comes from the disk for each forward: nothing that is made from it pays."""
    with tempfile.TemporaryDirectory() as folder:
        disk_offload(q.layer.eval(), folder, execution_device=q.device)
        with torch.no_grad(), calls_of(functional._convert_weight_packed_for_cpu) as packed:
            for _ in range(3):
                q.layer(q.x[:1])
    yield same(packed[0] <= 1, True)


@program(may_raise=META)
def saved_while_offloaded(q: Quantized):
    """The state dict of a model whose weights are on meta between two forwards."""
    model = torch.nn.Sequential(q.layer).eval()
    cpu_offload(model, execution_device=q.device)
    yield from through(q, model, times=1)
    model.state_dict()
    yield from through(q, model, times=1)


@program(kinds=BOTH, may_raise="(?i)meta|detach|device")
def built_on_meta_and_emptied(q: Quantized):
    """A layer is built on meta, given memory, and filled with float weights before it is quantized."""
    with torch.device("meta"):
        layer = type(q.layer)(COLUMNS, ROWS, **{**q.kind.options, "bias": False})
    layer = layer.to_empty(device="cpu").requires_grad_(False)
    layer.load_state_dict({"weight": q.unquantized().weight.data})
    yield close(layer.to(q.device)(q.x), q.expected(), 0.2)


@program(kinds=BOTH, may_raise="(?i)meta|detach|device")
def moved_to_meta(q: Quantized):
    """A copy goes to meta for its shapes; the original stays."""
    import copy

    shape = copy.deepcopy(q.layer).to("meta")
    yield same(shape.weight.device.type, "meta")
    yield q.right(q.layer(q.x))
