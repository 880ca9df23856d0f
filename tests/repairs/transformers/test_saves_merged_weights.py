"""Quantized layers that a checkpoint joins are saved each by its own name."""

from __future__ import annotations

import pytest
import torch

import patches
from patches.repairs.reproducers import tiny_models

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers", minversion="5.10", reason="HRM came with 5.10")

from . import asking  # noqa: E402

ID = "transformers-saves-merged-weights"
KIND = "HrmTextForCausalLM"


def save(folder) -> None:
    torch.manual_seed(0)
    size = {**tiny_models.SIZE, "num_hidden_layers": 2}
    getattr(transformers, KIND)(transformers.HrmTextConfig(vocab_size=16, head_dim=32, **size)).save_pretrained(folder)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(asking.IDS, use_cache=False).logits


@pytest.mark.parametrize("skip", [None, ["o_proj", "lm_head"]], ids=["all", "some"])
@pytest.mark.parametrize("how", asking.HOW)
def test_it_loads_without_the_plugin(tmp_path, how, skip):
    save(tmp_path / "plain")
    model = asking.load(tmp_path / "plain", {**asking.HOW[how], "llm_int8_skip_modules": skip}, KIND)
    expected = {path: model.get_submodule(path).weight.data.clone() for path in asking.quantized(model)}
    with patches.applied(ID):
        model.save_pretrained(tmp_path / "packed")
    again = asking.load(tmp_path / "packed", kind=KIND)
    assert asking.quantized(again) == list(expected)
    assert all(torch.equal(again.get_submodule(path).weight.data, weight) for path, weight in expected.items())
    if how == "nf4":
        assert torch.equal(logits(again), logits(model))


def test_a_plain_model_is_saved_as_before(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    save(tmp_path / "plain")
    model = asking.load(tmp_path / "plain", kind=KIND)
    model.save_pretrained(tmp_path / "before")
    with patches.applied(ID):
        model.save_pretrained(tmp_path / "after")
    before, after = (safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert any("gqkv_proj" in key for key in after)
