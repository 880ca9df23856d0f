"""Prompt and prefix tuning of models that say their device in every way that peft accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import patches

PretrainedConfig = pytest.importorskip("transformers").PretrainedConfig
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")

ID = "peft-adapters-on-meta"
CONFIGS = {
    name: lambda name=name: getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=2)
    for name in ("PromptTuningConfig", "PrefixTuningConfig")
}


class Own(torch.nn.Module):
    """A model that is not of transformers: its device is what its author wrote."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.config = PretrainedConfig(vocab_size=10, hidden_size=8, num_layers=1, num_attention_heads=2)
        self.device = device
        self.embed = torch.nn.Embedding(10, 8)
        self.head = torch.nn.Linear(8, 10)

    def prepare_inputs_for_generation(self) -> None: ...


class Asked(Own):
    """One that counts how often it is asked."""

    asked = 0

    @property
    def device(self) -> str:
        self.asked += 1
        return "cpu"

    @device.setter
    def device(self, value: Any) -> None: ...


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None, "meta", torch.device("meta")], ids=repr)
def test_a_device_that_peft_takes_is_used_as_it_is(device, config):
    def where() -> torch.device:
        torch.manual_seed(0)
        model = peft.get_peft_model(Own(device), CONFIGS[config]())
        return model.prompt_encoder["default"].embedding.weight.device

    expected = where()
    with patches.applied(ID):
        assert where() == expected


def test_a_model_is_asked_once():
    with patches.applied(ID):
        model = Asked("cpu")
        peft.get_peft_model(model, CONFIGS["PromptTuningConfig"]())
    assert model.asked == 1


@pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=repr)
def test_an_offloaded_model_gets_its_prompt_where_it_runs(device):
    with patches.applied(ID):
        model = accelerate.cpu_offload(Own(device), execution_device=torch.device("cpu"))
        model = peft.get_peft_model(model, CONFIGS["PromptTuningConfig"]())
    assert model.prompt_encoder["default"].embedding.weight.device.type == "cpu"


def test_a_model_with_its_embedding_in_place_keeps_its_prompt_there():
    """Another layer of it is offloaded, and computes on another device."""
    with patches.applied(ID):
        model = Own("cpu")
        accelerate.cpu_offload(model.head, execution_device=torch.device("meta"))
        model = peft.get_peft_model(model, CONFIGS["PromptTuningConfig"]())
    assert model.prompt_encoder["default"].embedding.weight.device.type == "cpu"


@pytest.mark.parametrize("device", ["nowhere", "cpu:x"])
def test_what_is_no_device_is_an_error_of_torch_as_before(device):
    def error() -> tuple[type, str]:
        with pytest.raises((TypeError, RuntimeError)) as caught:
            peft.get_peft_model(Own(device), CONFIGS["PromptTuningConfig"]())
        return caught.type, str(caught.value)

    expected = error()
    with patches.applied(ID):
        assert error() == expected
