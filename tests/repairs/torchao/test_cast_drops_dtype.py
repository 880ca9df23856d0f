"""``.float()`` and ``.half()`` of native torchao weights: measured against their own ``.to(dtype)``."""

from __future__ import annotations

import copy
import io

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
utils = pytest.importorskip("torchao.utils", reason="torchao is not installed")

import torchao.quantization as q
from torchao.quantization import IntxUnpackedToInt8Tensor, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup

import patches
from patches.engine.gate import satisfied

ID = "torchao-cast-drops-dtype"

INTX = {
    "4-bit": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "8-bit": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
    "8da4w": lambda: q.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)),
}
SHORT = {"float": torch.float32, "half": torch.float16}
X = torch.linspace(-2, 2, 3 * 64).view(3, 64)


def quantized(config, dtype=torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).to(dtype).eval()
    quantize_(model, config)
    return model


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return ((out.double() - reference.double()).norm() / reference.double().norm()).item()


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("config", INTX)
def test_short_names_are_to(config, name, device):
    expected = quantized(INTX[config]()).to(device, SHORT[name])
    with patches.applied(ID):
        model = getattr(quantized(INTX[config]()).to(device), name)()
        weight, reference = model[0].weight, expected[0].weight
        assert isinstance(weight, IntxUnpackedToInt8Tensor) and weight.dtype == SHORT[name]
        for part in ("qdata", "scale", "zero_point"):
            assert getattr(weight, part).dtype == getattr(reference, part).dtype
            assert torch.equal(getattr(weight, part), getattr(reference, part))
        x = X.to(device, SHORT[name])
        assert torch.equal(model(x), expected(x))


def test_an_embedding_follows():
    embedding = torch.nn.Sequential(torch.nn.Embedding(16, 64)).bfloat16()
    quantize_(embedding, INTX["4-bit"](), lambda module, name: isinstance(module, torch.nn.Embedding))
    ids, expected = torch.tensor([1, 5]), copy.deepcopy(embedding).to(torch.float32)
    with patches.applied(ID):
        out = embedding.float()(ids)
    assert out.dtype == torch.float32 and torch.equal(out, expected(ids))


def test_export_and_compile_after_a_short_name():
    expected = quantized(INTX["8da4w"]()).to(torch.float32)(X)
    with patches.applied(ID):
        model = quantized(INTX["8da4w"]()).float()
        program = torch.export.export(model, (X,))
        types = {n.meta["val"].dtype for n in program.graph.nodes if "dequantize_affine" in str(n.target)}
        assert types == {torch.float32}
        assert torch.equal(program.module()(X), expected)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(X), expected)


def test_a_cast_inside_a_compiled_function():
    weight = quantized(INTX["4-bit"]())[0].weight.detach()

    def run(x, weight):
        return torch.nn.functional.linear(x, weight.float())

    with patches.applied(ID):
        out = torch.compile(run, backend="aot_eager", fullgraph=True)(X, weight)
        assert torch.equal(out, run(X, weight))
    assert out.dtype == torch.float32


@pytest.mark.parametrize("cast", ["float", "to"])
def test_float8_follows_without_losing_its_scales(cast):
    config = q.Float8WeightOnlyConfig()
    before = quantized(config)[0].weight
    with patches.applied(ID):
        model = quantized(config)
        model = model.float() if cast == "float" else model.to(torch.float32)
        weight = model[0].weight
        assert weight.dtype == torch.float32 == model(X).dtype
    assert torch.equal(weight.qdata.view(torch.int8), before.qdata.view(torch.int8))
    assert weight.scale.dtype == before.scale.dtype and torch.equal(weight.scale, before.scale)
    # The weight that is now used is the product of codes and scales, no longer rounded to bfloat16.
    product = before.qdata.float() * before.scale
    assert torch.equal(model[0](X), torch.nn.functional.linear(X, product, model[0].bias))


@pytest.mark.skipif(not satisfied("torchao>=0.15"), reason="Int8Tensor came with torchao 0.15")
@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("activations", [False, True], ids=["weight-only", "8da8w"])
def test_int8_that_followed_its_input_is_bit_identical(activations, name):
    kind = q.Int8DynamicActivationInt8WeightConfig if activations else q.Int8WeightOnlyConfig
    x = X.to(SHORT[name])
    unpatched = getattr(quantized(kind(version=2)), name)()
    assert unpatched[0].weight.dtype == torch.bfloat16
    with patches.applied(ID):
        model = getattr(quantized(kind(version=2)), name)()
        assert model[0].weight.dtype == model[0].weight.dequantize().dtype == SHORT[name]
        assert torch.equal(model(x), unpatched(x))


@pytest.mark.skipif(not satisfied("torchao>=0.17"), reason="Int8Tensor by groups works from torchao 0.17 on")
def test_int8_by_groups_is_no_longer_rounded_to_the_old_dtype():
    config = q.Int8WeightOnlyConfig(version=2, granularity=PerGroup(32))
    unpatched = quantized(config).float()
    with patches.applied(ID):
        model = quantized(config).float()
    weight = model[0].weight
    exact = weight.qdata.double() * weight.scale.double().repeat_interleave(32, dim=1)
    reference = torch.nn.functional.linear(X.double(), exact, model[0].bias.double())
    assert relative_error(model[0](X), reference) < 1e-6 < 1e-4 < relative_error(unpatched[0](X), reference)


@pytest.mark.parametrize("config", INTX)
def test_casts_that_were_right_are_bit_identical(config):
    def casts():
        model = quantized(INTX[config]())
        yield model(X.bfloat16())
        yield model.bfloat16()(X.bfloat16())
        yield copy.deepcopy(model).to(torch.float16)(X.half())
        yield copy.deepcopy(model).to("cpu", torch.float32)(X)
        yield quantized(INTX[config](), torch.float32).float()(X)

    unpatched = list(casts())
    with patches.applied(ID):
        for out, before in zip(casts(), unpatched, strict=True):
            assert out.dtype == before.dtype and torch.equal(out, before)


def test_double_is_as_unsupported_as_before():
    with patches.applied(ID):
        assert quantized(INTX["4-bit"]()).double()[0].weight.dtype == torch.bfloat16


def test_a_class_with_its_own_to_copy_is_left_alone():
    """One that keeps its dtype on purpose, registered the way torchao's own optimizer states are."""

    class Fixed(IntxUnpackedToInt8Tensor):
        pass

    @Fixed.implements(torch.ops.aten._to_copy.default)
    def keep(func, types, args, kwargs):
        return args[0]

    weight = quantized(INTX["4-bit"]())[0].weight.detach()
    names, attributes = weight.__tensor_flatten__()
    fixed = Fixed.__tensor_unflatten__({n: getattr(weight, n) for n in names}, attributes, None, None)
    with patches.applied(ID):
        assert weight.float().dtype == torch.float32
        assert fixed.float().dtype == torch.bfloat16


def test_weights_go_through_a_file_after_a_cast():
    with patches.applied(ID):
        model, file = quantized(INTX["4-bit"]()).half(), io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = quantized(INTX["4-bit"](), torch.float16)
        other.load_state_dict(torch.load(file), assign=True)
        assert other[0].weight.dtype == torch.float16
        assert torch.equal(other(X.half()), model(X.half()))
