"""What an INT8 layer keeps until backward, and what saved-tensor hooks see: not a resident weight."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import patches
from patches.engine.gate import satisfied
from tests.repairs.bitsandbytes.int8.layers import gradients, linear, packed, product
from tests.repairs.bitsandbytes.offloading import offloaded

ID = "bitsandbytes-int8-backward-live-state"


@pytest.mark.parametrize("training", [True, False])
def test_hooks_carry_neither_a_resident_weight_nor_the_input_of_a_frozen_one(training):
    layer, x = linear(bias=False).train(training).requires_grad_(False), torch.randn(4, 64)
    assert not packed(layer, x)
    with patches.applied(ID):
        assert not packed(layer, x)


@pytest.mark.parametrize("training", [True, False])
def test_hooks_see_codes_and_scales_that_are_no_parameter(training):
    x = torch.randn(4, 64)
    reference = gradients(linear(bias=False).train(training), x)[1]
    weight = linear(bias=False).weight
    codes, scales = weight.data.clone(), weight.SCB.clone()
    call = product(codes, scales, training)
    assert not any(t.dtype == torch.int8 for t in packed(call, x)), "the defect is gone without the patch"
    with patches.applied(ID):
        seen = packed(call, x)
        assert [t.data_ptr() for t in seen] == [codes.data_ptr(), scales.data_ptr()], "copied, or the input is there"
        leaf = x.clone().requires_grad_(True)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            y = call(leaf)
        codes.data.zero_(), scales.data.zero_()
        y.square().sum().backward()
    assert torch.equal(leaf.grad, reference), "what the hooks gave back"


@pytest.mark.skipif(satisfied("bitsandbytes<0.48"), reason="before 0.48 no float weight is trained on a CPU")
def test_hooks_see_what_the_gradient_of_a_weight_needs():
    torch.manual_seed(0)
    layer, x = bnb.nn.Linear8bitLt(64, 96, bias=False), torch.randn(4, 64)
    expected = gradients(layer, x)
    with patches.applied(ID):
        assert all(map(torch.equal, gradients(layer, x), expected))
        seen = packed(layer, x)
    assert torch.int8 in {t.dtype for t in seen} and any(torch.equal(t, x) for t in seen if t.shape == x.shape)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_offloaded_codes_are_not_held_until_backward(reentrant, training, tmp_path):
    """As by nn.Linear: without checkpointing autograd holds them, with it they are brought again."""

    def make(*sizes: int, **options) -> bnb.nn.Linear8bitLt:
        return bnb.nn.Linear8bitLt(*sizes, **options, has_fp16_weights=False).train(training)

    with patches.applied():
        held, gradient, expected = offloaded(make, reentrant, tmp_path / "int8")
        plain, *_ = offloaded(torch.nn.Linear, reentrant, tmp_path / "plain")
    assert torch.equal(gradient, expected)
    assert held == plain == (4 if reentrant is None else 0)


@pytest.mark.parametrize("training", [True, False])
def test_save_on_cpu_gives_the_same_gradients(training):
    layer = linear().train(training).requires_grad_(False)
    x = torch.randn(4, 64)
    reference = gradients(layer, x)
    with patches.applied(ID), torch.autograd.graph.save_on_cpu():
        assert all(map(torch.equal, gradients(layer, x), reference))


def inputs_kept(make, training: bool, how: bool | None) -> int:
    """How many of the inputs of six layers in a row are alive between forward and backward."""
    layers = [make().train(training).requires_grad_(False) for _ in range(6)]
    inputs: list[StorageWeakRef] = []

    def block(x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        x = torch.sin(x)
        inputs.append(StorageWeakRef(x.untyped_storage()))
        return torch.sin(layer(x))

    x = torch.randn(4, 64, requires_grad=True)
    for layer in layers:
        x = block(x, layer) if how is None else checkpoint(block, x, layer, use_reentrant=how)
    return sum(not ref.expired() for ref in inputs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", [None, True, False])
def test_as_many_inputs_are_kept_as_by_nn_linear(training, how):
    def make() -> bnb.nn.Linear8bitLt:
        return bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu")

    with patches.applied(ID):
        kept = inputs_kept(make, training, how)
    assert kept == inputs_kept(lambda: torch.nn.Linear(64, 64), training, how) == 0
    if how is not True:  # reentrant checkpointing ran without grad, so even the unpatched keeps nothing
        assert inputs_kept(make, training, how) == 6
