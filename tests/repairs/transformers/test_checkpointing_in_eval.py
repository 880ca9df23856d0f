"""The warning about idle checkpointing: once, with the remedy, and only where it is true."""

from __future__ import annotations

import logging

import pytest
import torch

import patches

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.one_in(2)

ID = "transformers-checkpointing-in-eval"


def llama(training: bool, checkpointing: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    model = transformers.LlamaForCausalLM(config).train(training)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def loss(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(6).view(1, 6)
    return model(input_ids=ids, labels=ids).loss


def idle(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "does nothing" in r.getMessage()]


def test_once_with_the_remedy_and_again_for_another_model(caplog):
    with patches.applied(ID), caplog.at_level(logging.WARNING, "bnb_patches"):
        model = llama(False)
        for _ in range(3):
            loss(model)
        assert len(idle(caplog)) == 1
        assert "LlamaDecoderLayer" in idle(caplog)[0] and "Call model.train()" in idle(caplog)[0]
        loss(llama(False))
        assert len(idle(caplog)) == 2


def test_a_loaded_model_prepared_for_lora_by_hand(caplog):
    with patches.applied(ID), caplog.at_level(logging.WARNING, "bnb_patches"):
        model = llama(False, checkpointing=False)
        model.is_loaded_in_8bit = True
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
        tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        loss(tuned)
        assert tuned.training and len(idle(caplog)) == 1


@pytest.mark.parametrize("case", ["train", "no checkpointing", "no_grad"])
def test_silent_where_nothing_is_wrong(case, caplog):
    with patches.applied(ID), caplog.at_level(logging.WARNING, "bnb_patches"):
        model = llama(case == "train", checkpointing=case != "no checkpointing")
        with torch.set_grad_enabled(case != "no_grad"):
            loss(model)
    assert not idle(caplog)


@pytest.mark.parametrize("training", [True, False])
def test_the_same_results_in_one_graph(training):
    def step(call, model: torch.nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        value = loss(call)
        value.backward()
        return [value.detach(), *(p.grad for p in model.parameters())]

    expected = step(model := llama(training), model)
    with patches.applied(ID):
        model = llama(training)
        assert all(map(torch.equal, step(model, model), expected))
        assert all(map(torch.equal, step(torch.compile(model, fullgraph=True, backend="aot_eager"), model), expected))
