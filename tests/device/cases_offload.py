"""Layers that accelerate offloads give what they give whole on the device, to the bit, in every way and mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

from tests.device import watch
from tests.device.layers import CHECKPOINTING, KINDS, inputs, places, rounds_alike, same, stack, statistics, step

pytestmark = [pytest.mark.one_in(4), pytest.mark.usefixtures("patched")]


def dispatch(rest: str) -> Callable[[torch.nn.Sequential, str, Path], object]:
    return lambda model, device, folder: accelerate.dispatch_model(
        model.to("cpu"), {"0": device, "1": rest}, main_device=device, offload_dir=folder, force_hooks=True
    )


WAYS: dict[str, Callable[[torch.nn.Sequential, str, Path], object]] = {
    "cpu_offload": lambda model, device, folder: accelerate.cpu_offload(model, device),
    "cpu_offload each": lambda model, device, folder: [accelerate.cpu_offload(layer, device) for layer in model],
    "disk_offload": lambda model, device, folder: accelerate.disk_offload(model, folder, device),
    "dispatch cpu": dispatch("cpu"),
    "dispatch disk": dispatch("disk"),
    "hook each": lambda model, device, folder: [
        add_hook_to_module(layer, AlignDevicesHook(device, offload=True)) for layer in model
    ],
}


@pytest.fixture(params=WAYS)
def offload(request, device, tmp_path) -> Callable[[torch.nn.Sequential], torch.nn.Sequential]:
    """Offloads a model, some of its layers or all."""

    def call(model: torch.nn.Sequential) -> torch.nn.Sequential:
        WAYS[request.param](model, device, tmp_path)
        assert model[1].weight.is_meta
        return model

    return call


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", KINDS)
def test_two_training_steps(kind, checkpointing, offload, device):
    x, reentrant = inputs(device), CHECKPOINTING[checkpointing]
    whole = stack(kind, device)
    expected = [step(whole, x, reentrant), step(whole, 2 * x, reentrant)]
    model = offload(stack(kind, device))
    assert same(step(model, x, reentrant), expected[0])
    assert same(step(model, 2 * x, reentrant), expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation(kind, offload, device):
    x = inputs(device)
    with torch.no_grad():
        expected = stack(kind, device).eval()(x)
        model = offload(stack(kind, device)).eval()
        assert torch.equal(model(x), expected) and torch.equal(model(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_between_training_steps(kind, offload, device):
    x = inputs(device)
    expected = step(stack(kind, device), x)
    model = offload(stack(kind, device))
    step(model, x)
    with torch.no_grad():
        model.eval()(x)
    assert same(step(model.train(), x), expected)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_settled_call_brings_what_is_offloaded_once(kind, training, offload, device, request):
    def settled(model: torch.nn.Sequential) -> watch.Events:
        run = (lambda: step(model, x)) if training else torch.no_grad()(lambda: model(x))
        run(), run()
        with watch.watch() as seen:
            run()
        return seen

    x, whole = inputs(device), stack(kind, device)
    codes, scales = whole[0].weight.nbytes, [tensor.nbytes for tensor in statistics(whole[0])]
    model = offload(stack(kind, device))
    expected, seen = settled(whole), settled(model)
    assert seen.kernels == expected.kernels
    brought = [codes, model[0].bias.nbytes, *(scales[:1] if "int8" in kind else [])]
    allowed = Counter(("host to device", size) for size in brought)
    if "hook each" in request.node.name:
        # A hook by hand keeps the parameter itself: 4-bit statistics, which are shared, follow it to the host and back.
        allowed += Counter((way, size) for way in ("device to host", "host to device") for size in scales)
    offloaded = sum(layer.weight.is_meta for layer in model)
    extra = Counter(seen.copies) - Counter(expected.copies)
    assert extra["host to device", codes] == offloaded
    assert extra <= Counter({copied: offloaded * count for copied, count in allowed.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_layers_quantized_on_the_cpu_and_offloaded_to_it(kind, device):
    x = inputs(device)
    expected = step(stack(kind, "cpu").to(device), x)
    model = accelerate.cpu_offload(stack(kind, "cpu"), device)
    assert same(step(model, x), expected) and same(step(model, x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_moved_whole_before_and_after_each_call(kind, device):
    if not rounds_alike(kind, device):
        pytest.skip("quantized on the CPU and on the GPU")
    x = inputs(device)
    expected = stack(kind, device)(x)
    model, hook = accelerate.cpu_offload_with_hook(stack(kind, "cpu"), device)
    for _ in range(3):
        assert torch.equal(model(x), expected)
        hook.offload()
        assert places(model) == {"cpu"}


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_hooks_a_model_is_whole_again(kind, offload, device, request):
    x = inputs(device)
    expected = step(stack(kind, device), x)
    model = offload(stack(kind, device))
    model(x)
    remove_hook_from_module(model, recurse=True)
    model.to(device)
    if "hook each" in request.node.name and "int8" in kind:
        with pytest.raises(RuntimeError, match="SCB"):  # such a hook keeps no scales, and gives back codes without
            step(model, x)
        return
    assert same(step(model, x), expected)
    assert places(model) == {device}


@pytest.mark.parametrize("kind", KINDS)
def test_executed_on_the_other_device(kind, device, other):
    x = inputs(device)
    expected = stack(kind, device)(x)
    model = stack(kind, device)
    for layer in model:
        accelerate.cpu_offload(layer, other)
    with watch.watch() as seen:
        assert torch.equal(model(x), expected), "the output comes back to where the input was"
    assert ("device to device", x.nbytes) in seen.copies


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_kept_on_the_cpu(kind, pinned, device):
    x = inputs(device)
    expected = step(stack(kind, device), x)
    model = accelerate.cpu_offload(stack(kind, device), device)
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        assert same(step(model, x), expected)
