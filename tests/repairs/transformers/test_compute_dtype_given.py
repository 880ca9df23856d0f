"""A compute dtype or a threshold that is given counts for a checkpoint that is quantized already."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import patches
from patches.repairs.reproducers.log_records import record_logs

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

from . import asking  # noqa: E402

ID = "transformers-compute-dtype-given"
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    asking.llama(path / "plain")
    asking.load(path / "plain", {**FOUR, "bnb_4bit_compute_dtype": torch.bfloat16}).save_pretrained(path / "nf4")
    asking.load(path / "plain", {**asking.INT8, "llm_int8_threshold": 4.0}).save_pretrained(path / "int8")
    return path


def computes(model) -> tuple[torch.dtype, torch.dtype]:
    layer = model.model.layers[0].mlp.up_proj
    return layer.compute_dtype, model.config.quantization_config.bnb_4bit_compute_dtype


def threshold(model) -> tuple[float, float]:
    state = model.model.layers[0].mlp.up_proj.state
    return state.threshold, model.config.quantization_config.llm_int8_threshold


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "AutoModelForCausalLM"])
@pytest.mark.parametrize("given", [torch.float16, torch.float32, "float16"], ids=str)
def test_a_compute_dtype(folder, kind, given):
    with patches.applied(ID):
        model = asking.load(folder / "nf4", {**FOUR, "bnb_4bit_compute_dtype": given}, kind)
    wanted = getattr(torch, given) if isinstance(given, str) else given
    assert computes(model) == (wanted, wanted)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "AutoModelForCausalLM"])
def test_one_that_was_not_given_is_that_of_the_file(folder, kind):
    with patches.applied(ID):
        assert computes(asking.load(folder / "nf4", FOUR, kind)) == (torch.bfloat16, torch.bfloat16)
        assert computes(asking.load(folder / "nf4", None, kind)) == (torch.bfloat16, torch.bfloat16)
        assert threshold(asking.load(folder / "int8", asking.INT8, kind)) == (4.0, 4.0)


@pytest.mark.parametrize("given", [0.0, 5.0, float("6")])
def test_a_threshold(folder, given):
    with patches.applied(ID):
        model = asking.load(folder / "int8", {**asking.INT8, "llm_int8_threshold": given})
    assert threshold(model) == (given, given)


def test_what_is_in_the_tensors_stays(folder):
    with patches.applied(ID):
        model = asking.load(folder / "nf4", {**FOUR, "bnb_4bit_use_double_quant": True})
    assert not model.config.quantization_config.bnb_4bit_use_double_quant


def test_a_list_is_said_to_have_no_effect(folder):
    with patches.applied(ID), record_logs() as said:
        asking.load(folder / "nf4", {**FOUR, "llm_int8_skip_modules": ["mlp"]})
    assert ["has no effect" in record.getMessage() for record in said] == [True]


@pytest.mark.parametrize("name", ["", ".", None], ids=repr)
def test_an_empty_name_is_an_error(folder, name):
    with patches.applied(ID), pytest.raises(ValueError, match="names no module"):
        asking.load(folder / "nf4", {**FOUR, "llm_int8_skip_modules": [name]})


def test_a_configuration_is_saved_as_before():
    how = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=3.0)
    with patches.applied(ID):
        again = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=3.0)
        default = transformers.BitsAndBytesConfig(load_in_8bit=True)
    assert again.to_dict() == how.to_dict() and again.to_diff_dict() == how.to_diff_dict()
    assert default.llm_int8_threshold == 6.0
    with patches.applied(ID), pytest.raises(TypeError, match="must be a float"):
        transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=6)
