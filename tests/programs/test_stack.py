"""The whole stack as installed, newest or oldest: quantize, load from disk, train LoRA, save, load again.

The one test that runs on the oldest supported transformers, peft and accelerate too (`nox -s oldest`),
so it uses only what all of them have.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import patches
from patches.engine import gate
from patches.engine.report import Status

CONFIGS = {
    "unquantized": None,
    "4-bit": dict(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    ),
    "INT8": dict(load_in_8bit=True),
}
TOKENS = torch.arange(16).view(2, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A Llama on disk."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def load(folder: str, kind: str) -> torch.nn.Module:
    options = CONFIGS[kind]
    quantization = {} if options is None else {"quantization_config": BitsAndBytesConfig(**options)}
    dtype = {"dtype" if gate.satisfied("transformers>=4.56") else "torch_dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"}, **dtype, **quantization)


def losses(folder: str, kind: str, adapter: str | None = None) -> list[float]:
    """Three steps of LoRA under gradient checkpointing; saves the adapter, if a place is given."""
    model = load(folder, kind)
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    curve = []
    for _ in range(3):
        logits = model(input_ids=TOKENS).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 128).float(), TOKENS[:, 1:].reshape(-1))
        loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    if adapter is not None:
        model.save_pretrained(adapter)
        again = PeftModel.from_pretrained(load(folder, kind), adapter).eval()
        with torch.no_grad():
            torch.testing.assert_close(again(TOKENS).logits, model.eval()(TOKENS).logits, rtol=1e-3, atol=1e-3)
    return curve


@pytest.mark.parametrize("kind", ["4-bit", "INT8"])
def test_a_quantized_model_trains_as_the_unquantized_one_does(folder, tmp_path, kind):
    with patches.applied():
        states = {r.id: r.reason for r in patches.report().with_status(Status.CONFLICT, Status.FAILED)}
        assert not states
        curve = losses(folder, kind, str(tmp_path))
    expected = losses(folder, "unquantized")
    assert curve[2] < curve[1] < curve[0]
    fall = expected[0] - expected[2]
    assert curve == pytest.approx(expected, abs=0.2 * fall), "quantization error moves the curve less than this"
