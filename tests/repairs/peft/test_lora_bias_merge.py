"""Merging LoRA with a bias of its own into quantized layers: what is added to the bias, and when."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

import patches
from patches.engine.gate import satisfied

ID = "peft-lora-bias-merge"
X = torch.linspace(-2, 2, 3 * 64).view(3, 64)
LAYERS = {
    "int8": lambda bias: bnb.nn.Linear8bitLt(64, 64, bias=bias, has_fp16_weights=False),
    "nf4": lambda bias: bnb.nn.Linear4bit(64, 64, bias=bias, compute_dtype=torch.float32, quant_type="nf4"),
}

if satisfied("peft<0.15") and not torch.cuda.is_available():
    pytest.skip("peft 0.14 dequantizes on CUDA only", allow_module_level=True)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft: merging rounds
        yield


def model_with_bias(kind: str, base_bias: bool = True, lora_bias: bool = True, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = LAYERS[kind](base_bias) if kind in LAYERS else torch.nn.Linear(64, 64, base_bias)
    base = torch.nn.Sequential(layer).to("cpu")
    base.is_loaded_in_8bit, base.is_loaded_in_4bit = kind == "int8", kind == "nf4"
    options = {"r": 4, "lora_alpha": 32, "target_modules": ["0"], **options}
    config = peft.LoraConfig(lora_bias=lora_bias, init_lora_weights=False, **options)
    return peft.get_peft_model(base, config).eval()


def base_layer(model: torch.nn.Module) -> torch.nn.Module:
    return model.base_model.model[0].get_base_layer()


def merge(model: torch.nn.Module, safe: bool, adapters: list[str] | None = None) -> None:
    model.base_model.model[0].merge(safe_merge=safe, adapter_names=adapters)


def added(model: torch.nn.Module, adapter: str = "default") -> torch.Tensor:
    """What the adapter adds to the bias in a forward."""
    layer = model.base_model.model[0]
    return (layer.lora_B[adapter].bias * layer.scaling[adapter]).detach()


@pytest.mark.parametrize("safe", [True, False], ids=["safe", "unsafe"])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_merged_bias_is_the_one_that_was_trained(kind, safe):
    with patches.applied(ID), torch.no_grad():
        model = model_with_bias(kind)
        expected = base_layer(model).bias + added(model)
        out = model(X)
        merged = model.merge_and_unload(safe_merge=safe)
        assert torch.equal(merged[0].bias, expected)
        assert (merged(X) - out).norm() / out.norm() < 0.1


@pytest.mark.parametrize("kind", LAYERS)
def test_without_the_patch_it_is_another(kind):
    with torch.no_grad():
        model = model_with_bias(kind)
        expected, off = base_layer(model).bias + added(model), added(model) * 7 / 8
        assert torch.allclose(model.merge_and_unload()[0].bias + off, expected, atol=1e-5)
        with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
            model_with_bias(kind).merge_and_unload(safe_merge=True)


@pytest.mark.parametrize("safe", [True, False], ids=["safe", "unsafe"])
@pytest.mark.parametrize("kind", LAYERS)
def test_two_adapters_in_and_out(kind, safe):
    with patches.applied(ID), torch.no_grad():
        model = model_with_bias(kind)
        torch.manual_seed(3)
        other = peft.LoraConfig(
            r=8, lora_alpha=4, target_modules=["0"], lora_bias=True, init_lora_weights=False, bias="none"
        )
        model.add_adapter("other", other)
        before = base_layer(model).bias.clone()
        merge(model, safe, ["default", "other"])
        expected = before + added(model) + added(model, "other")
        assert torch.allclose(base_layer(model).bias, expected, atol=1e-6)
        model.unmerge_adapter()
        assert torch.allclose(base_layer(model).bias, before, atol=1e-5)


def contents(model: torch.nn.Module) -> list[torch.Tensor]:
    layer = base_layer(model)
    weight = layer.weight
    statistics = weight.quant_state.absmax if hasattr(weight, "quant_state") else weight.SCB
    return [t.clone() for t in (weight.data, statistics, layer.bias) if t is not None]


@pytest.mark.parametrize("kind", LAYERS)
def test_a_bias_that_is_not_finite_is_refused_before_the_weight_is_touched(kind):
    with patches.applied(ID), torch.no_grad():
        model = model_with_bias(kind)
        model.base_model.model[0].lora_B["default"].bias[3] = float("nan")
        before = contents(model)
        with pytest.raises(ValueError, match="'default': the merged bias is not finite"):
            merge(model, safe=True)
        assert all(map(torch.equal, contents(model), before))
        model.base_model.model[0].lora_B["default"].bias[3] = 0
        merge(model, safe=True)


@pytest.mark.parametrize("safe", [True, False], ids=["safe", "unsafe"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_base_without_a_bias_is_refused_before_the_weight_is_touched(kind, safe):
    with patches.applied(ID), torch.no_grad():
        model = model_with_bias(kind, base_bias=False)
        out, before = model(X), contents(model)
        with pytest.raises(RuntimeError, match="its base layer has no bias"):
            merge(model, safe)
        assert all(map(torch.equal, contents(model), before)) and torch.equal(model(X), out)


@pytest.mark.parametrize("kind", LAYERS)
def test_an_adapter_without_a_bias_is_merged_bit_for_bit_as_before(kind):
    def merged() -> torch.nn.Module:
        return model_with_bias(kind, lora_bias=False).merge_and_unload(safe_merge=True)

    with torch.no_grad():
        before = merged()
        with patches.applied(ID):
            after = merged()
        assert torch.equal(after[0].weight.data, before[0].weight.data) and torch.equal(after(X), before(X))
        assert torch.equal(after[0].bias, before[0].bias)


@pytest.mark.parametrize("safe", [True, False], ids=["safe", "unsafe"])
def test_plain_layers(safe):
    with patches.applied(ID), torch.no_grad():
        model = model_with_bias("plain")
        out = model(X)
        again = copy.deepcopy(model)
        assert torch.allclose(model.merge_and_unload(safe_merge=safe)(X), out, atol=1e-4)
        bias = base_layer(again).bias.clone()
        merge(again, safe)
        again.unmerge_adapter()
        assert torch.allclose(base_layer(again).bias, bias, atol=1e-5)


@pytest.mark.parametrize("safe", [True, False], ids=["safe", "unsafe"])
def test_a_convolution(safe):
    with patches.applied(ID), torch.no_grad():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["0"], lora_bias=True, init_lora_weights=False)
        model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), config).eval()
        x = torch.randn(2, 3, 6, 6)
        out = model(x)
        assert torch.allclose(model.merge_and_unload(safe_merge=safe)(x), out, atol=1e-4)
