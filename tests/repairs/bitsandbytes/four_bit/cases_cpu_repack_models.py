"""Whole models on CPUs with AVX512-BF16: transformers, peft and the Trainer."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.nn import Linear4bit

from .cpu_layers import NESTED, QUIET, infer, patched, relative, same_state

__all__ = ["patched"]
pytestmark = QUIET


def checkpoint(where, biases: bool, tied: bool) -> str:
    """A tiny Llama (or Qwen2: attention with biases) on disk."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config, model = (
        (transformers.Qwen2Config, transformers.Qwen2ForCausalLM)
        if biases
        else (transformers.LlamaConfig, transformers.LlamaForCausalLM)
    )
    torch.manual_seed(0)
    saved = model(config(vocab_size=128, num_key_value_heads=2, tie_word_embeddings=tied, **sizes))
    for name, parameter in saved.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2 if "bias" in name else 0.06)
    saved.bfloat16().save_pretrained(where)
    return str(where)


def load(path: str, repacks: bool = True, nested: bool = True) -> torch.nn.Module:
    import transformers

    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, quantization_config=how, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    for module in model.modules():
        if isinstance(module, Linear4bit) and not repacks:
            module.support_avx512bf16_for_cpu = False
    return model


def lora(model: torch.nn.Module) -> torch.nn.Module:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config)


def ids() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randint(0, 128, (2, 8))


@pytest.fixture(params=[(False, False), (True, True)], ids=["llama", "qwen2-tied"])
def path(request, tmp_path):
    return checkpoint(tmp_path / "model", *request.param)


@NESTED
def test_saved_dequantized_and_alive_after_eval(path, nested, tmp_path):
    model, clean = load(path, nested=nested), load(path, repacks=False, nested=nested)
    logits = infer(model.eval(), ids()).logits
    assert relative(logits, infer(clean.eval(), ids()).logits) < 0.05
    assert same_state(model, clean)

    model.save_pretrained(tmp_path / "again")
    reloaded = load(str(tmp_path / "again"), repacks=False)
    assert same_state(reloaded, clean)
    assert torch.equal(infer(reloaded.eval(), ids()).logits, infer(clean, ids()).logits)
    assert torch.equal(infer(model, ids()).logits, logits)  # the live model afterwards

    dense, expected = model.dequantize(torch.bfloat16), clean.dequantize(torch.bfloat16)
    assert torch.equal(infer(dense, ids()).logits, infer(expected, ids()).logits)


def test_adapters_after_eval(path):
    model, clean = lora(load(path)), lora(load(path, repacks=False))
    for _ in range(2):
        infer(model.eval(), ids())
        grads = []
        for each in (model.train(), clean.train()):
            each.zero_grad()
            each(input_ids=ids(), labels=ids()).loss.backward()
            grads.append({n: p.grad for n, p in each.named_parameters() if p.requires_grad})
        assert all(g is not None for g in grads[0].values())
        assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[1])

    infer(model.eval(), ids())
    merged, expected = model.merge_and_unload(), clean.eval().merge_and_unload()
    assert same_state(merged, expected)


def test_trainer_that_evaluates_between_steps(tmp_path):
    """Unpatched, the step after the first evaluation raises: Qwen2 has biases."""
    import transformers

    path = checkpoint(tmp_path / "model", biases=True, tied=False)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (8, 8)).tolist()]

    def losses(evaluate: bool) -> list[float]:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            eval_strategy="steps" if evaluate else "no",
            eval_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(lora(load(path)), arguments, train_dataset=data, eval_dataset=data[:2])
        trainer.train()
        assert evaluate == any("eval_loss" in entry for entry in trainer.state.log_history)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses(evaluate=False)
    assert len(expected) == 4 and len(set(expected)) == 4
    assert losses(evaluate=True) == expected
