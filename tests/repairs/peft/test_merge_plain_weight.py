"""An adapter on a layer that is quantized by its class alone: it runs, and what merges it says which layer it is."""

from __future__ import annotations

import warnings

import bitsandbytes as bnb
import peft
import pytest
import torch

import patches

IDS = torch.arange(4)


class Model(torch.nn.Module):
    def __init__(self, bits: int, tied: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 64)
        if bits == 8:
            self.head = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
        else:
            self.head = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32)
        self.head.weight = self.embedding.weight if tied else torch.nn.Parameter(torch.randn(64, 64))
        self.is_loaded_in_8bit, self.is_loaded_in_4bit = bits == 8, bits == 4

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=["head"], init_lora_weights=False),
    "vera": lambda: peft.VeraConfig(target_modules=["head"]),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config, bits", [("lora", 8), ("vera", 8), ("vera", 4)])
def test_a_merge_is_refused_by_the_name_of_the_layer_and_changes_nothing(config, bits, tied):
    torch.manual_seed(0)
    with patches.applied(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(Model(bits, tied), CONFIGS[config]())
        expected = model(IDS)
        before = {name: t.clone() for name, t in model.state_dict().items()}
        with pytest.raises(ValueError, match=r"'base_model\.model\.head\.base_layer' .* not quantized.*skip_modules"):
            model.merge_adapter()
        assert torch.equal(model(IDS), expected)
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
