"""Variants and initializations of LoRA on quantized layers, beside the same on the ``nn.Linear`` that each stands for."""

from __future__ import annotations

import copy
import importlib.util

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

import peft.tuners.lora.config as configs

import patches
from patches.engine.gate import satisfied
from tests.repairs.peft.stood_for import X, gradients, models, relative_error

ID = "peft-lora-options-ignored"
NAMES = ["0", "2"]
VARIANTS = {}
if satisfied("peft>=0.19"):
    VARIANTS["use_bdlora"] = lambda: configs.BdLoraConfig(
        target_modules_bd_a=["0"], target_modules_bd_b=["2"], nblocks=2
    )
if satisfied("peft>=0.20"):
    VARIANTS["velora_config"] = lambda: configs.VeloraConfig(num_groups=4)
    VARIANTS["monteclora_config"] = lambda: configs.MontecloraConfig(num_samples=2, buffer_size=2)
INITIALIZED = (["orthogonal"] if satisfied("peft>=0.16") else []) + (["mica"] if satisfied("peft>=0.20") else [])
REPLACING = {"pissa": {"init_lora_weights": "pissa"}, "pissa_niter_4": {"init_lora_weights": "pissa_niter_4"}}
if importlib.util.find_spec("scipy"):  # which peft asks for
    REPLACING["loftq"] = {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}}
if satisfied("peft>=0.15"):
    REPLACING["corda"] = {"init_lora_weights": "corda"}
if satisfied("peft>=0.21"):
    REPLACING["kasa"] = {"kasa_config": configs.KasaConfig()}


def with_adapter(model, bits=None, noise=True, **options):
    """LoRA on both layers, its values not those at the start; ``bits``: what the model says of itself, as loaded."""
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=NAMES, **options))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and noise:
                parameter += torch.randn_like(parameter) * 0.05
    return model


def trained(model) -> dict[str, tuple]:
    return {n: (tuple(p.shape), p.dtype) for n, p in model.named_parameters() if p.requires_grad}


def factors(model) -> list[tuple[torch.Tensor, torch.Tensor]]:
    layers = [model.base_model.model[0], model.base_model.model[2]]
    return [(layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()) for layer in layers]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("option", VARIANTS)
class TestVariant:
    def test_it_is_the_one_that_nn_linear_gets(self, option, bits):
        model, plain = models(bits)
        with patches.applied():
            model = with_adapter(model, bits, **{option: VARIANTS[option]()}).eval()
            plain = with_adapter(plain, **{option: VARIANTS[option]()}).eval()
            assert trained(model) == trained(plain)
            assert trained(plain) != trained(with_adapter(models(bits)[1])) or option == "velora_config"
            assert relative_error(model(X), plain(X)) < 0.02
            for grad, expected in zip(gradients(model), gradients(plain), strict=True):
                assert relative_error(grad, expected) < 0.1

    def test_saved_loaded_and_merged(self, option, bits, tmp_path):
        with patches.applied():
            model = with_adapter(models(bits)[0], bits, **{option: VARIANTS[option]()}).eval()
            expected = model(X)
            model.save_pretrained(tmp_path)
            base = models(bits)[0]
            base.is_loaded_in_4bit, base.is_loaded_in_8bit = bits == 4, bits == 8
            again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
            assert relative_error(again(X), expected) < 1e-6
            model.merge_adapter()
            assert relative_error(model(X), expected) < 0.15
            model.unmerge_adapter()
            assert relative_error(model(X), expected) < 1e-6

    def test_a_second_adapter_gets_its_own(self, option, bits):
        def two(model, bits=None):
            model = with_adapter(model, bits)
            model.add_adapter("more", peft.LoraConfig(r=4, target_modules=NAMES, **{option: VARIANTS[option]()}))
            model.set_adapter("more")
            return model

        model, plain = models(bits)
        with patches.applied():
            assert trained(two(model, bits)) == trained(two(plain))

    def test_without_the_patch_it_is_ignored_or_refused(self, option, bits):
        model, plain = models(bits)
        with patches.applied():
            expected = type(
                with_adapter(plain, **{option: VARIANTS[option]()}).base_model.model[0].lora_variant["default"]
            )
        try:
            layer = with_adapter(model, bits, **{option: VARIANTS[option]()}).base_model.model[0]
        except ValueError as error:
            assert "does not support VeLoRA" in str(error)
        else:
            assert expected is not type(layer.lora_variant.get("default"))


@pytest.mark.skipif(not satisfied("peft>=0.20"), reason="before peft 0.20 nn.Linear takes one of two variants, too")
@pytest.mark.parametrize("bits", [8, 4])
def test_two_variants_that_nn_linear_refuses_are_refused(bits):
    with patches.applied(), pytest.raises(ValueError, match="variant combination"):
        with_adapter(models(bits)[0], bits, use_dora=True, alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM")


@pytest.mark.parametrize("flagged", [True, False], ids=["flagged", "unflagged"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("method", INITIALIZED)
def test_factors_are_those_of_the_weight(method, bits, flagged):
    model, plain = models(bits)
    with patches.applied():
        model = with_adapter(model, bits if flagged else None, noise=False, init_lora_weights=method)
        plain = with_adapter(plain, noise=False, init_lora_weights=method)
        assert trained(model) == trained(plain)
        for (a, b), (reference_a, reference_b) in zip(factors(model), factors(plain), strict=True):
            assert torch.equal(a, reference_a)
            assert relative_error(b.abs(), reference_b.abs()) < 1e-4  # a singular vector has either sign
            assert float((b @ a).abs().max()) < 1e-6


@pytest.mark.skipif(not satisfied("bitsandbytes>=0.47"), reason="before 0.47 a CPU dequantizes from uint8 storage only")
@pytest.mark.parametrize("method", INITIALIZED)
def test_weights_stored_in_bfloat16_are_not_taken_for_weights(method):
    def model(storage: torch.dtype):
        torch.manual_seed(0)
        options = {"quant_type": "nf4", "compute_dtype": torch.float32, "quant_storage": storage}
        return torch.nn.Sequential(
            bnb.nn.Linear4bit(64, 64, **options), torch.nn.ReLU(), bnb.nn.Linear4bit(64, 64, **options)
        )

    with patches.applied():
        found, expected = (
            factors(with_adapter(model(storage).to("cpu"), 4, noise=False, init_lora_weights=method))
            for storage in (torch.bfloat16, torch.uint8)
        )
        for pair, reference in zip(found, expected, strict=True):
            assert all(map(torch.equal, pair, reference))


@pytest.mark.parametrize("flagged", [True, False], ids=["flagged", "unflagged"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("option", REPLACING)
def test_what_replaces_the_base_weight_is_an_error_that_changes_nothing(option, bits, flagged):
    model, _ = models(bits)
    before, weight = model(X), model[0].weight.detach().clone()
    with patches.applied():
        with pytest.raises(
            ValueError, match=rf"{option.partition('_')[0]}.*Linear(4|8)bit(Lt)? '0' .*without quantization_config"
        ):
            with_adapter(model, bits if flagged else None, **REPLACING[option])
        assert torch.equal(model(X), before)
        assert torch.equal(model[0].weight, weight)


@pytest.mark.skipif(not satisfied("peft>=0.19"), reason="LoRA-GA came with peft 0.19")
class TestLoraGa:
    CONFIG = {"init_lora_weights": "lora_ga"}

    @pytest.mark.parametrize("bits", [8, 4])
    def test_gradients_of_packed_weights_are_refused(self, bits):
        config = peft.LoraConfig(r=4, target_modules=NAMES, lora_ga_config=configs.LoraGAConfig(), **self.CONFIG)
        model, _ = models(bits)
        with (
            patches.applied(),
            pytest.raises(ValueError, match=r"lora_ga.*'0' .*path_initial_model_for_weight_conversion"),
        ):
            peft.tuners.lora.loraga.preprocess_loraga(model, config, lambda: model(X).sum().backward())

    @pytest.mark.parametrize("bits", [8, 4])
    def test_gradients_of_the_unquantized_model_are_refused(self, bits):
        model, _ = models(bits)
        for layer in (model[0], model[2]):
            layer._peft_loraga_grad = torch.randn(64, 64)
        with patches.applied(), pytest.raises(ValueError, match="'lora_ga'.*'0'"):
            with_adapter(model, bits, lora_ga_config=configs.LoraGAConfig(), **self.CONFIG)

    @pytest.mark.parametrize("bits", [8, 4])
    def test_what_the_error_says_works(self, bits, tmp_path):
        """Made on the unquantized model, saved as plain LoRA, loaded onto the quantized one."""
        model, plain = models(bits)
        config = peft.LoraConfig(r=4, target_modules=NAMES, lora_ga_config=configs.LoraGAConfig(), **self.CONFIG)
        with patches.applied():
            peft.tuners.lora.loraga.preprocess_loraga(plain, config, lambda: plain(X).sum().backward())
            tuned = peft.get_peft_model(plain, config)
            tuned.peft_config["default"].init_lora_weights = True
            tuned.save_pretrained(tmp_path / "initial")
            tuned.peft_config["default"].init_lora_weights = "lora_ga"
            with torch.no_grad():
                for a, _ in factors(tuned):
                    a += 0.1 * torch.randn_like(a)
            expected = tuned(X)
            tuned.save_pretrained(tmp_path / "own", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
            model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8
            loaded = peft.PeftModel.from_pretrained(model, tmp_path / "own").eval()
            assert relative_error(loaded(X), expected) < 0.02


@pytest.mark.parametrize("option", [*VARIANTS, *INITIALIZED, *REPLACING])
def test_unquantized_layers_are_bit_identical(option):
    if option == "corda":
        pytest.skip("it needs covariances of the model, and raises its own error without them")
    if option == "loftq" and not torch.cuda.is_available():
        pytest.skip("without this project's peft-loftq-device it needs CUDA")
    options = (
        {option: VARIANTS[option]()} if option in VARIANTS else REPLACING.get(option, {"init_lora_weights": option})
    )
    plain = models(8)[1]
    before = with_adapter(copy.deepcopy(plain), **options).eval()
    with patches.applied(ID):
        after = with_adapter(copy.deepcopy(plain), **options).eval()
        assert trained(after) == trained(before)
        assert torch.equal(after(X), before(X))
        assert all(map(torch.equal, gradients(after), gradients(before)))
