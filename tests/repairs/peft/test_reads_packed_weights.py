"""Adapters that read the weight, on quantized layers, against the same adapter on the weights that these stand for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

import patches
from patches.engine.gate import satisfied
from tests.repairs.peft import stood_for
from tests.repairs.peft.stood_for import X, models, relative_error

pytestmark = pytest.mark.one_in(2)

ID = "peft-reads-packed-weights"

ON = {"target_modules": ["0", "2"]}
TUNERS = {"LoHa": lambda: peft.LoHaConfig(r=4, **ON), "LoKr": lambda: peft.LoKrConfig(r=4, **ON)}
if satisfied("peft<0.16"):
    TUNERS["OFT"] = lambda: peft.OFTConfig(r=4, **ON)
if satisfied("peft<0.20"):
    TUNERS["BOFT"] = lambda: peft.BOFTConfig(boft_block_size=16, **ON)
if satisfied("peft>=0.17,<0.20"):
    TUNERS["SHiRA"] = lambda: peft.ShiraConfig(r=4, random_seed=0, **ON)
    TUNERS["SHiRA where weights are large"] = lambda: with_mask(peft.ShiraConfig(r=4, **ON))
if satisfied("peft>=0.18,<0.19"):
    TUNERS["OSF"] = lambda: peft.OSFConfig(effective_rank=8, **ON)
if satisfied("peft>=0.18"):
    TUNERS["DeLoRA"] = lambda: peft.DeloraConfig(r=4, delora_lambda=1.0, **ON)
if satisfied("peft>=0.19"):
    TUNERS["TinyLoRA"] = lambda: peft.TinyLoraConfig(r=4, **ON)
if satisfied("peft>=0.20"):
    TUNERS["FRoD"] = lambda: peft.FrodConfig(progressbar=False, **ON)
    TUNERS["FRoD with dropout"] = lambda: peft.FrodConfig(progressbar=False, frod_dropout=1e-9, **ON)


def with_mask(config: peft.PeftConfig) -> peft.PeftConfig:
    def large(layer: torch.nn.Module, r: int, **_: object) -> torch.Tensor:
        mask = torch.zeros(layer.weight.numel())
        mask[layer.weight.flatten().abs().topk(r * sum(layer.weight.shape)).indices] = 1
        return mask.view(layer.weight.shape)

    config.mask_fn = large
    return config


def with_adapter(model: torch.nn.Module, name: str) -> torch.nn.Module:
    return stood_for.with_adapter(model, TUNERS[name]())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", TUNERS)
def test_it_equals_the_same_adapter_on_the_weights_that_are_stood_for(name, bits):
    model, plain = models(bits)
    base = plain(X)
    with patches.applied():
        model, plain = with_adapter(model, name), with_adapter(plain, name)
        assert relative_error(plain(X), base) > 0.01, "the adapter does something"
        stood_for.assert_equal_to_dense(model, plain, at_least=2)


@pytest.mark.skipif(not satisfied("bitsandbytes>=0.47"), reason="before 0.47 a CPU dequantizes from uint8 storage only")
@pytest.mark.parametrize("name", TUNERS)
def test_weights_stored_as_floats_are_not_taken_for_weights(name):
    def model(storage: torch.dtype) -> torch.nn.Module:
        torch.manual_seed(0)
        options = {"quant_type": "nf4", "compute_dtype": torch.float32, "quant_storage": storage}
        layers = (bnb.nn.Linear4bit(64, 64, **options), torch.nn.ReLU(), bnb.nn.Linear4bit(64, 64, **options))
        return torch.nn.Sequential(*layers).to("cpu")

    with patches.applied():
        stored, plain = with_adapter(model(torch.float32), name), with_adapter(model(torch.uint8), name)
        assert relative_error(stored(X), plain(X)) < 1e-5


@pytest.mark.parametrize("name", TUNERS)
def test_unquantized_layers_are_bit_identical(name):
    stood_for.assert_unquantized_layers_are_as_before(ID, lambda model: with_adapter(model, name))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", TUNERS)
def test_a_merge_into_packed_weights_is_an_error_that_changes_nothing(name, bits):
    model, _ = models(bits)
    with patches.applied():
        model = with_adapter(model, name).eval()
        before = model(X)
        with pytest.raises(
            NotImplementedError, match=r"0\.base_layer' holds packed (INT8|4-bit) weights.*dequantize\(\)"
        ):
            model.merge_adapter()
        assert torch.equal(model(X), before)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", TUNERS)
def test_a_saved_adapter_gives_the_same_outputs(name, bits, tmp_path):
    with patches.applied():
        model = with_adapter(models(bits)[0], name).eval()
        expected = model(X)
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(models(bits)[0], tmp_path).eval()
        assert relative_error(again(X), expected) < 1e-6
