"""A tied head stays ``nn.Linear`` and tied, whatever is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import patches

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

from . import asking  # noqa: E402

ID = "transformers-tied-head-quantized"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asking.llama(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.mark.parametrize("how", asking.HOW)
def test_it_is_plain_tied_and_right_for_saving_and_peft(tied, tmp_path, how):
    peft = pytest.importorskip("peft")
    expected = asking.load(tied, asking.HOW[how])
    with patches.applied(ID):
        model = asking.load(tied, {**asking.HOW[how], "llm_int8_skip_modules": ["no_such_module"]})
        assert type(model.lm_head) is torch.nn.Linear
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(asking.logits(model), asking.logits(expected))
        model.save_pretrained(tmp_path)
    assert type(asking.load(tmp_path).lm_head) is torch.nn.Linear, "also without the plugin"
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    assert not [name for name, _ in tuned.named_modules() if "lm_head.lora" in name]


def test_a_head_that_is_not_tied_is_quantized_by_a_list_without_it(tmp_path):
    asking.llama(tmp_path)
    how = {**asking.NF4, "llm_int8_skip_modules": ["q_proj"]}
    expected = asking.load(tmp_path, how)
    with patches.applied(ID):
        model = asking.load(tmp_path, how)
    assert type(model.lm_head) is type(expected.lm_head) and "lm_head" in asking.quantized(model)
    assert model.config.to_dict() == expected.config.to_dict()


def test_without_a_list_nothing_changes(tied):
    expected = asking.load(tied, asking.NF4)
    with patches.applied(ID):
        model = asking.load(tied, asking.NF4)
    assert model.config.to_dict() == expected.config.to_dict()
    assert torch.equal(asking.logits(model), asking.logits(expected))
