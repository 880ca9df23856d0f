"""A float32 compute dtype that nobody chose is said once; one that was chosen is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import patches
from patches.config import float32_compute
from patches.repairs.reproducers.log_records import record_logs

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")

from . import asking  # noqa: E402

ID, GIVEN = "transformers-float32-compute-default", "transformers-compute-dtype-given"
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
HALF = {"torch_dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    asking.llama(path / "plain")
    asking.load(path / "plain", FOUR, **HALF).save_pretrained(path / "nf4")
    return path


@pytest.fixture(autouse=True)
def first(monkeypatch):
    monkeypatch.setattr(float32_compute, "_told", set())


def said(folder: Path, how, *ids: str, times: int = 1, **also) -> list[str]:
    with patches.applied(ID, *ids), record_logs() as records:
        for _ in range(times):
            model = asking.load(folder, how, **also)
    assert model.model.layers[0].mlp.up_proj.compute_dtype is model.config.quantization_config.bnb_4bit_compute_dtype
    return [text for text in (record.getMessage() for record in records) if "compute in float32" in text]


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "AutoModelForCausalLM"])
def test_said_once_with_the_remedy(folder, kind):
    (text,) = said(folder / "plain", FOUR, kind=kind, times=2, **HALF)
    assert "bnb_4bit_compute_dtype=torch.bfloat16" in text


def test_said_of_a_checkpoint(folder):
    (text,) = said(folder / "nf4", None, **HALF)
    assert "its checkpoint says so" in text


@pytest.mark.parametrize("dtype", ["float32", torch.float32, torch.bfloat16], ids=str)
def test_one_that_was_chosen(folder, dtype):
    assert not said(folder / "plain", {**FOUR, "bnb_4bit_compute_dtype": dtype}, **HALF)
    assert not said(folder / "nf4", {**FOUR, "bnb_4bit_compute_dtype": dtype}, GIVEN, **HALF)


def test_a_model_in_float32_and_int8(folder):
    assert not said(folder / "plain", FOUR, torch_dtype=torch.float32)
    with patches.applied(ID), record_logs() as records:
        asking.load(folder / "plain", asking.INT8, **HALF)
    assert not records


def test_numbers_are_the_same(folder):
    expected = asking.logits(asking.load(folder / "plain", FOUR, **HALF))
    with patches.applied(ID), record_logs():
        assert torch.equal(asking.logits(asking.load(folder / "plain", FOUR, **HALF)), expected)
