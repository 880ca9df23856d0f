"""LoRA on a Llama whose layers quantize their activations, as users write it with transformers and peft."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
utils = pytest.importorskip("torchao.utils", reason="torchao is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from torchao.quantization import Int8DynamicActivationInt8WeightConfig

import patches
from patches.engine.gate import satisfied

ID = "torchao-quantized-activations-gradient"
IDS = torch.arange(32).view(2, 16)

if satisfied("torchao<0.15"):
    pytest.skip("transformers names this configuration otherwise for torchao 0.14", allow_module_level=True)
if satisfied("peft>=0.18") and satisfied("torchao<0.16"):
    pytest.skip("this peft takes no torchao before 0.16", allow_module_level=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def quantized(checkpoint: Path, dtype: torch.dtype) -> torch.nn.Module:
    config = transformers.TorchAoConfig(Int8DynamicActivationInt8WeightConfig())
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, quantization_config=config)


def reference(checkpoint: Path, model: torch.nn.Module) -> torch.nn.Module:
    """The same model in float32, with the weights that those of ``model`` stand for."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and type(module.weight.data) is not torch.Tensor:
            weight = getattr(module.weight, "original_weight_tensor", module.weight)
            plain.get_submodule(name).weight.data.copy_(weight.dequantize())
    return plain


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def overall_error(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    ours, expected = (torch.cat([g[n].flatten().double() for n in sorted(expected)]) for g in (ours, expected))
    return ((ours - expected).norm() / expected.norm()).item()


def test_every_adapter_is_trained(checkpoint):
    model = quantized(checkpoint, torch.float32)
    plain = reference(checkpoint, model)
    model, plain = with_lora(model), with_lora(plain)
    missing = [name for name, grad in gradients(model).items() if grad is None]
    assert len(missing) == 8, missing
    before = model(input_ids=IDS).logits
    with patches.applied(ID):
        assert torch.equal(model(input_ids=IDS).logits, before)
        assert overall_error(gradients(model), gradients(plain)) < 0.01


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_with_gradient_checkpointing(checkpoint, reentrant):
    with patches.applied(ID):
        model = with_lora(quantized(checkpoint, torch.bfloat16))
        model.enable_input_require_grads()
        expected = gradients(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for name, grad in gradients(model).items():
            assert torch.equal(grad, expected[name]), name


def test_compiled_as_one_graph(checkpoint):
    with patches.applied(ID):
        model = with_lora(quantized(checkpoint, torch.float32))
        expected = {name: grad.clone() for name, grad in gradients(model).items()}
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for name, grad in gradients(compiled).items():
            assert torch.equal(grad, expected[name.removeprefix("_orig_mod.")]), name
