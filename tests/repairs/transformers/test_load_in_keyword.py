"""``from_pretrained(..., load_in_4bit=True)`` and its kin on transformers 5."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import patches
from patches.repairs.reproducers.log_records import record_logs
from patches.repairs.transformers import load_in_keyword

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 4 takes the argument itself")

from . import asking  # noqa: E402

ID = "transformers-load-in-keyword"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asking.llama(tmp_path_factory.mktemp("llama"))


def load(folder: Path, kind: str = "AutoModelForCausalLM", **also):
    return getattr(transformers, kind).from_pretrained(folder, device_map="cpu", **also)


@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize(
    "given",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"},
        {"load_in_8bit": True, "llm_int8_threshold": 5.0, "load_in_4bit": False},
        {"load_in_8bit": True, "llm_int8_skip_modules": ["q_proj", "lm_head"]},
    ],
    ids=["4bit", "8bit", "skip"],
)
def test_it_is_what_the_configuration_would_be(folder, kind, given):
    expected = load(folder, kind, quantization_config=transformers.BitsAndBytesConfig(**given))
    with patches.applied(ID), record_logs():
        model = load(folder, kind, **given)
    assert model.config.to_dict() == expected.config.to_dict()
    assert [type(m) for m in model.modules()] == [type(m) for m in expected.modules()]
    assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))


def test_false_is_nothing(folder):
    with patches.applied(ID), record_logs() as said:
        model = load(folder, load_in_4bit=False, load_in_8bit=False)
    assert not asking.quantized(model) and not said


def test_both_are_refused(folder):
    how = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with patches.applied(ID), pytest.raises(ValueError, match="load_in_8bit=True and a quantization_config"):
        load(folder, load_in_8bit=True, quantization_config=how)


def test_it_is_said_once(folder, monkeypatch):
    monkeypatch.setattr(load_in_keyword, "_told", set())
    with patches.applied(ID), record_logs() as said:
        load(folder, load_in_8bit=True)
        load(folder, load_in_8bit=True)
    assert ["BitsAndBytesConfig(load_in_8bit=True)" in record.getMessage() for record in said] == [True]


def test_another_argument_is_refused_as_before(folder):
    with patches.applied(ID), pytest.raises(TypeError, match="load_in_2bit"):
        load(folder, load_in_2bit=True)
