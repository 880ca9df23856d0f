"""The gradient through layers that quantize their activations: measured against the weights that they stand for."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
utils = pytest.importorskip("torchao.utils", reason="torchao is not installed")

import torchao.quantization as q
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_
from torchao.quantization.granularity import PerGroup, PerTensor

import patches
from patches.engine.gate import satisfied

pytestmark = pytest.mark.one_in(3)

ID = "torchao-quantized-activations-gradient"
INT8 = q.Int8DynamicActivationInt8WeightConfig

CONFIGS = {
    "default": INT8,
    "intx": lambda: q.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerGroup(16)),
}
if satisfied("torchao>=0.15"):
    CONFIGS["version 2"] = lambda: INT8(version=2)
    CONFIGS["per tensor"] = lambda: INT8(version=2, granularity=PerTensor())
if satisfied("torchao>=0.17"):
    CONFIGS["asymmetric"] = lambda: INT8(version=2, act_mapping_type=q.quant_primitives.MappingType.ASYMMETRIC)


def layers(config, *, bias: bool = True, dtype=torch.float32) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A quantized model, and one of the weights that its layers stand for."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=bias), torch.nn.Linear(48, 32, bias=bias)).to(dtype)
    reference = copy.deepcopy(model)
    quantize_(model, config())
    for layer, plain in zip(model, reference, strict=True):
        weight = getattr(layer.weight, "original_weight_tensor", layer.weight)
        plain.weight.data.copy_(weight.dequantize())
    return model, reference


def inputs(*shape: int, dtype=torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, 64, dtype=dtype, requires_grad=True)


def gradients(model, x, wanted=None, **kwargs) -> list[torch.Tensor]:
    """Those of ``x`` and of the parameters that have one."""
    out = model(x, **kwargs)
    torch.manual_seed(2)
    trained = [x, *(p for p in model.parameters() if p.requires_grad)] if isinstance(model, torch.nn.Module) else [x]
    return list(torch.autograd.grad(out, trained, torch.randn_like(out) if wanted is None else wanted))


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return ((out.double() - reference.double()).norm() / reference.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 5)], ids=["vector", "matrix", "batch"])
@pytest.mark.parametrize("config", CONFIGS)
def test_it_is_that_of_the_weight_that_is_stood_for(config, shape, dtype, device):
    model, reference = (m.to(device) for m in layers(CONFIGS[config], dtype=dtype))
    x = inputs(*shape, dtype=dtype).to(device).detach().requires_grad_()
    before = model(x).detach()
    with patches.applied(ID):
        assert torch.equal(model(x), before)
        (grad,) = torch.autograd.grad(model(x), x, torch.ones_like(before))
    (expected,) = torch.autograd.grad(reference(x), x, torch.ones_like(before))
    assert grad.dtype == x.dtype
    assert relative_error(grad, expected) < (1e-6 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("config", CONFIGS)
def test_without_the_patch_it_is_lost(config, bias):
    model, _ = layers(CONFIGS[config], bias=bias)
    x = inputs(5)
    out = model(x)
    assert not out.requires_grad or torch.autograd.grad(out.sum(), x, allow_unused=True) == (None,)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_gradient_of_a_bias_is_the_same_as_before(config):
    model, reference = layers(CONFIGS[config], dtype=torch.bfloat16)
    for layer in model:
        layer.bias.requires_grad_(layer is model[1])
    x = inputs(2, 5, dtype=torch.bfloat16)
    (before,) = torch.autograd.grad(model(x).sum(), model[1].bias)
    with patches.applied(ID):
        (after,) = torch.autograd.grad(model(x).sum(), model[1].bias)
        model[0].bias.requires_grad_()
        (first,) = torch.autograd.grad(model(x).sum(), model[0].bias)
    assert torch.equal(after, before)
    (expected,) = torch.autograd.grad(reference(x).sum(), reference[0].bias)
    assert relative_error(first, expected) < 0.01


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("config", CONFIGS)
def test_checkpointed(config, reentrant):
    model, _ = layers(CONFIGS[config])
    x = inputs(2, 5)
    with patches.applied(ID):
        plain = gradients(model, x)
        model.requires_grad_(False)  # torch.autograd.grad and parameters are not for reentrant checkpoints
        out = checkpoint(model, x, use_reentrant=reentrant)
        torch.manual_seed(2)
        out.backward(torch.randn_like(out))
    assert torch.equal(x.grad, plain[0])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("config", CONFIGS)
def test_compiled_it_is_one_graph_and_the_same(config, bias):
    model, _ = layers(CONFIGS[config], bias=bias)
    x = inputs(2, 5)
    with patches.applied(ID):
        expected = gradients(model, x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), model(x))
        for grad, eager in zip(gradients(compiled, x), expected, strict=True):
            assert torch.equal(grad, eager)


def test_compiled_by_inductor_and_checkpointed_within():
    model, _ = layers(INT8, bias=False)
    x = inputs(2, 5)

    def run(x):
        return checkpoint(model, x, use_reentrant=False).relu()

    with patches.applied(ID):
        (grad,) = gradients(torch.compile(run, fullgraph=True), x)
        (eager,) = gradients(run, x)
    assert relative_error(grad, eager) < 1e-6


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_an_exported_program_is_the_one_that_it_was(strict):
    model, _ = layers(INT8)
    x = inputs(2, 5)
    before = torch.export.export(model, (x,), strict=strict)
    with patches.applied(ID):
        after = torch.export.export(model, (x,), strict=strict)
    assert [str(n.target) for n in after.graph.nodes] == [str(n.target) for n in before.graph.nodes]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_output_may_be_written_to(config, bias):
    model, reference = layers(CONFIGS[config], bias=bias)
    x = inputs(2, 5)

    def run(model, x):
        out = model[0](x)
        out += 1
        return model[1](torch.relu_(out))

    with patches.applied(ID):
        grad = torch.autograd.grad(run(model, x).sum(), x)[0]
        written = torch.compile(run, backend="aot_eager", fullgraph=True)(model, x)
        assert torch.equal(torch.autograd.grad(written.sum(), x)[0], grad)
    # What relu_ lets pass is told by activations that were rounded, so the weights alone do not give it.
    with torch.no_grad():
        passed = model[0](x) + 1 > 0
    expected = (passed * reference[1].weight.sum(0)) @ reference[0].weight
    assert relative_error(grad, expected) < 1e-6


def test_nothing_is_saved_that_hooks_would_carry():
    model, _ = layers(INT8, bias=False)
    x, seen = inputs(2, 5), []
    with patches.applied(ID), torch.autograd.graph.saved_tensors_hooks(seen.append, lambda _: None):
        model(x)
    assert seen == []
    with patches.applied(ID), torch.autograd.graph.save_on_cpu():
        assert gradients(model, x)[0].norm() > 0


def test_a_weight_that_was_written_to_before_backward_is_an_error():
    model, _ = layers(INT8)
    other, _ = layers(INT8)
    with patches.applied(ID):
        out = model(inputs(5))
        with torch.no_grad():
            model[1].weight.copy_(other[1].weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_twice_differentiated():
    model, reference = layers(INT8, bias=False)
    x = inputs(5)

    def penalty(model, x):
        (grad,) = torch.autograd.grad((model(x) ** 2).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), x)[0]

    with patches.applied(ID):
        assert relative_error(penalty(model, x), penalty(reference, x)) < 0.02


@pytest.mark.parametrize("empty", [(0,), (2, 0)], ids=["rows", "batch"])
@pytest.mark.parametrize("config", CONFIGS)
def test_no_rows(config, empty):
    """As an expert that no token was sent to."""

    def run(model, x):
        try:
            out = model(x)
            out.sum().backward()
        except Exception as error:
            return type(error)
        return out.shape

    model, _ = layers(CONFIGS[config])
    unpatched = run(model, inputs(*empty))
    with patches.applied(ID):
        assert run(model, inputs(*empty)) == unpatched


@pytest.mark.parametrize("config", ["weight-only", "intx"])
def test_a_gradient_that_was_there_is_bit_identical(config):
    kinds = {"weight-only": q.Int8WeightOnlyConfig, "intx": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int8)}
    model, _ = layers(kinds[config])
    x = inputs(2, 5)
    before = gradients(model, x)
    with patches.applied(ID):
        for grad, expected in zip(gradients(model, x), before, strict=True):
            assert torch.equal(grad, expected)


@pytest.mark.skipif(not satisfied("torchao>=0.16"), reason="static activations came with torchao 0.16")
@pytest.mark.parametrize("ndim", [2, 3])
def test_what_a_static_scale_clips_has_no_gradient(ndim):
    static = q.Int8StaticActivationInt8WeightConfig
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False))
    quantize_(model, static(act_quant_scale=torch.full((1,) * ndim, 0.01), granularity=PerTensor()))
    x = inputs(*(2, 5)[3 - ndim :])
    codes = (x / 0.01).round()
    expected = torch.ones(*x.shape[:-1], 48) @ model[0].weight.dequantize() * ((codes >= -128) & (codes <= 127))
    with patches.applied(ID):
        (grad,) = torch.autograd.grad(model(x).sum(), x)
    assert 0 < (grad == 0).sum() < grad.numel()
    assert relative_error(grad, expected) < 1e-6


@pytest.mark.skipif(not satisfied("torchao>=0.16"), reason="scales of SmoothQuant came with torchao 0.16")
def test_a_smoothed_activation():
    model, _ = layers(lambda: INT8(version=2), bias=False)
    scales = torch.linspace(0.5, 2, 64)
    model[0].weight.act_pre_scale = scales
    x = inputs(2, 5)
    expected = torch.ones(2, 5, 32) @ model[1].weight.dequantize() @ model[0].weight.dequantize() * scales
    with patches.applied(ID):
        (grad,) = torch.autograd.grad(model(x).sum(), x)
    assert relative_error(grad, expected) < 1e-6
