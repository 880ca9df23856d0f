"""A quantized GPT-2, dequantized, saved and loaded again, against the weights that it was quantized to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import patches
from patches.engine.gate import satisfied

bnb = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

from transformers.pytorch_utils import Conv1D

ID = "transformers-dequantize-conv1d"
IDS = torch.arange(16).view(2, 8)
HOW = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=32)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


def quantized(path: Path, how: str | None, **options) -> torch.nn.Module:
    if how is not None:
        options["quantization_config"] = transformers.BitsAndBytesConfig(**HOW[how])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, device_map="cpu", torch_dtype=torch.float32, **options
    )
    return model.eval()


def dequantized_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What its quantized layers stand for, of shape (out, in)."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            found[name] = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        elif isinstance(layer, bnb.nn.Linear8bitLt):
            scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
            found[name] = bnb.functional.int8_vectorwise_dequant(layer.weight.data, scales)
    assert len(found) == 8
    return found


@pytest.mark.parametrize("how", HOW)
def test_there_and_back(checkpoint, how, tmp_path):
    with patches.applied(), torch.no_grad():
        model = quantized(checkpoint, how)
        expected = dequantized_weights(model)
        plain = model.dequantize().float()
        for name, weight in expected.items():
            layer = plain.get_submodule(name)
            assert type(layer) is Conv1D and layer.weight.is_contiguous() and layer.weight.dtype == torch.float32
            assert torch.equal(layer.weight, weight.float().t())
        logits = plain(IDS).logits
        plain.save_pretrained(tmp_path)
        again = quantized(tmp_path, None)
        assert torch.equal(again(IDS).logits, logits)
        assert plain.state_dict().keys() == again.state_dict().keys()


@pytest.mark.parametrize("how", HOW)
def test_without_the_patch_it_is_loaded_wrong(checkpoint, how, tmp_path):
    with torch.no_grad():
        plain = quantized(checkpoint, how).dequantize().float()
        logits = plain(IDS).logits
        plain.save_pretrained(tmp_path)
        with pytest.raises(RuntimeError, match="mismatch"):
            quantized(tmp_path, None)
        again = quantized(tmp_path, None, ignore_mismatched_sizes=True)
        assert (again(IDS).logits - logits).norm() / logits.norm() > 0.1


@pytest.mark.parametrize("how", HOW)
def test_outputs_are_those_of_the_linear_layers(checkpoint, how):
    with torch.no_grad():
        linear = quantized(checkpoint, how).dequantize().float()(IDS).logits
        with patches.applied(ID):
            conv = quantized(checkpoint, how).dequantize().float()(IDS).logits
    torch.testing.assert_close(conv, linear)


def test_a_checkpoint_that_was_saved_quantized(checkpoint, tmp_path):
    with patches.applied(), torch.no_grad():
        quantized(checkpoint, "nf4").save_pretrained(tmp_path)
        model = quantized(tmp_path, None)
        expected = model(IDS).logits
        model.dequantize().float().save_pretrained(tmp_path / "plain")
        again = quantized(tmp_path / "plain", None)
        torch.testing.assert_close(again(IDS).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(
    satisfied("peft<0.15") and not torch.cuda.is_available(), reason="peft 0.14 dequantizes on CUDA only"
)
def test_after_a_merge(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    with patches.applied(), torch.no_grad():
        config = peft.LoraConfig(target_modules=["c_attn"], init_lora_weights=False)
        model = peft.get_peft_model(quantized(checkpoint, "nf4"), config).eval()
        plain = model.merge_and_unload().dequantize().float()
        logits = plain(IDS).logits
        plain.save_pretrained(tmp_path)
        assert torch.equal(quantized(tmp_path, None)(IDS).logits, logits)


def test_offloaded_in_part(checkpoint, tmp_path):
    with patches.applied(), torch.no_grad():
        whole = quantized(checkpoint, "nf4").dequantize().float()
        model = quantized(checkpoint, "nf4")
        accelerate.cpu_offload(model.transformer.h[1], execution_device="cpu")
        plain = model.dequantize()
        assert type(plain.transformer.h[1].mlp.c_fc) is Conv1D
        torch.testing.assert_close(plain(IDS).logits.float(), whole(IDS).logits, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("how", HOW)
def test_models_of_linear_layers_are_bit_identical(how, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with torch.no_grad():
        before = quantized(tmp_path, how).dequantize()
        with patches.applied(ID):
            after = quantized(tmp_path, how).dequantize()
        assert [type(m) for m in after.modules()] == [type(m) for m in before.modules()]
        assert all(torch.equal(a, b) for a, b in zip(after.parameters(), before.parameters(), strict=True))
        assert torch.equal(after(IDS).logits, before(IDS).logits)
