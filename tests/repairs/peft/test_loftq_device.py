"""replace_lora_weights_loftq on the device of the layer, in 4 bits and INT8."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from safetensors.torch import save_file

import patches
from tests.repairs.peft.stood_for import X, layer

ID = "peft-loftq-device"


def quantized(bits: int, folder, ran: bool = False):
    """A model of one layer with LoRA, and the weight that it had, which a file in ``folder`` holds."""
    torch.manual_seed(0)
    base = layer(bits, bias=False)
    weight = base.weight.detach().clone()
    save_file({"0.weight": weight}, folder / "model.safetensors")
    model = torch.nn.Sequential(base).to("cpu")
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8
    if ran:
        model(X)
    return peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=16, target_modules=["0"])), weight


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA another error")
def test_without_the_patch_it_asks_for_cuda(tmp_path):
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        peft.replace_lora_weights_loftq(quantized(4, tmp_path)[0], model_path=str(tmp_path))


@pytest.mark.parametrize("ran", [False, True], ids=["cold", "ran"])
@pytest.mark.parametrize("bits", [4, 8])
def test_lora_is_the_best_of_its_rank_for_what_quantization_took_away(bits, ran, tmp_path):
    with patches.applied():
        model, weight = quantized(bits, tmp_path, ran)
        with model.disable_adapter():
            rounded = model(torch.eye(64)).detach().T
        peft.replace_lora_weights_loftq(model, model_path=str(tmp_path))
        lora = model.base_model.model[0]
        found = (lora.lora_B["default"].weight @ lora.lora_A["default"].weight).detach()
        left, sizes, right = torch.linalg.svd(weight - lora_free(model))
        assert torch.dist(found, left[:, :16] * sizes[:16] @ right[:16]) < 1e-3 * found.norm()
        assert torch.dist(rounded + found, weight) < 0.85 * torch.dist(rounded, weight)


def lora_free(model) -> torch.Tensor:
    """The weight that the base of ``model`` stands for, by the arithmetic of bitsandbytes."""
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    base = model.base_model.model[0].get_base_layer()
    if base.weight.dtype == torch.int8:
        scale = base.state.SCB if base.state.SCB is not None else base.weight.SCB
        return int8_vectorwise_dequant(base.weight.data, scale).float()
    return dequantize_4bit(base.weight.data, base.weight.quant_state).float()


def test_a_callback_that_refuses_keeps_what_was_there(tmp_path):
    with patches.applied(ID):
        model, _ = quantized(8, tmp_path)
        before = {name: p.clone() for name, p in model.named_parameters() if "lora_" in name}
        peft.replace_lora_weights_loftq(model, model_path=str(tmp_path), callback=lambda model, name: False)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if "lora_" in name)


def test_a_model_without_quantized_layers_is_still_refused(tmp_path):
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), peft.LoraConfig(r=2, target_modules=["0"]))
    save_file({"0.weight": torch.ones(8, 8)}, tmp_path / "model.safetensors")
    with patches.applied(ID), pytest.raises(ValueError, match="No bnb LoRA module"):
        peft.replace_lora_weights_loftq(model, model_path=str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA it computes there, as before")
class TestOfAnUnquantizedWeight:
    """``init_lora_weights="loftq"``, where there is no accelerator."""

    @pytest.mark.parametrize("iterations", [1, 3])
    @pytest.mark.parametrize("bits", [4, 8])
    def test_lora_holds_what_quantization_takes_away(self, bits, iterations):
        if bits == 8:
            pytest.importorskip("scipy", reason="peft asks for scipy, which is not installed")
        torch.manual_seed(0)
        weight = torch.randn(48, 64)
        with patches.applied():
            base, a, b = peft.utils.loftq_utils.loftq_init(weight, bits, reduced_rank=16, num_iter=iterations)
        assert base.dtype == weight.dtype and not torch.equal(base, weight)
        assert float((base + b @ a - weight).norm()) < 0.8 * float((base - weight).norm())

    def test_without_the_patch_it_asks_for_cuda(self):
        with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
            peft.utils.loftq_utils.loftq_init(torch.randn(48, 64), 4, reduced_rank=16)

    def test_as_an_option_of_lora(self):
        pytest.importorskip("scipy", reason="peft asks for scipy, which is not installed")
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(64, 48))
        expected = plain(X)
        with patches.applied():
            config = peft.LoraConfig(
                r=16,
                lora_alpha=16,
                target_modules=["0"],
                init_lora_weights="loftq",
                loftq_config={"loftq_bits": 4, "loftq_iter": 1},
            )
            model = peft.get_peft_model(plain, config)
            error = float((model(X) - expected).norm())
            with model.disable_adapter():
                assert error < 0.8 * float((model(X) - expected).norm())


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA peft computes there, as before")
@pytest.mark.parametrize("bits", [8, 4])
def test_lora_is_merged_on_a_cpu(bits):
    """peft 0.14 moved the weight to CUDA for it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(layer(bits, bias=False)).to("cpu")
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = bits == 8, bits == 4
    x = torch.randn(4, 64)
    with patches.applied(), torch.no_grad():
        config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
        model = peft.get_peft_model(model, config).eval()
        expected = model(x)
        model.merge_adapter()
        assert float((model(x) - expected).norm() / expected.norm()) < (0.02 if bits == 8 else 0.2)
