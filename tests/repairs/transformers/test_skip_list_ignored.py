"""Names in ``llm_int8_skip_modules`` skip every layer whose path contains them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import patches
from patches.repairs.reproducers.log_records import record_logs

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")

from . import asking  # noqa: E402

ID = "transformers-skip-list-ignored"
LLAVA = "LlavaForConditionalGeneration"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asking.llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=11, hidden_size=16, intermediate_size=16)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asking.llava(tmp_path_factory.mktemp("llava"))


def contains(path: str, name: str) -> bool:
    """The rule, written once more: the components of ``name`` follow each other in those of ``path``."""
    parts, wanted = path.split("."), name.split(".")
    return any(parts[at : at + len(wanted)] == wanted for at in range(len(parts)))


@pytest.mark.parametrize("how", asking.HOW)
@pytest.mark.parametrize("name", ["mlp", "layers.1", "model.layers.1", "self_attn.q_proj", "q_proj", "layers.0.mlp"])
def test_what_contains_the_name_is_skipped_and_nothing_else(llama, how, name):
    with patches.applied(ID), record_logs() as said:
        model = asking.load(llama, {**asking.HOW[how], "llm_int8_skip_modules": [name, "lm_head"]})
    linear = asking.plain(model) + asking.quantized(model)
    assert sorted(asking.plain(model)) == sorted(p for p in linear if contains(p, name) or p == "lm_head")
    assert not said


@pytest.mark.parametrize("name", ["vision_tower", "model.vision_tower", "multi_modal_projector"])
def test_parts_of_a_vision_model(llava, name):
    with patches.applied(ID):
        model = asking.load(llava, {**asking.NF4, "llm_int8_skip_modules": [name, "lm_head"]}, LLAVA)
    assert asking.plain(model) and all(contains(path, name) or "lm_head" in path for path in asking.plain(model))
    assert not [path for path in asking.quantized(model) if contains(path, name)]


@pytest.mark.parametrize("name", ["vision_tower", "layers.0.mlp"])
def test_what_is_saved_loads_without_the_plugin(llava, tmp_path, name):
    with patches.applied(ID):
        model = asking.load(llava, {**asking.NF4, "llm_int8_skip_modules": [name, "lm_head"]}, LLAVA)
        model.save_pretrained(tmp_path)
    again = asking.load(tmp_path, kind=LLAVA)
    assert asking.plain(again) == asking.plain(model) and asking.quantized(again) == asking.quantized(model)
    assert torch.equal(asking.logits(again), asking.logits(model))


def test_the_object_of_the_user_stays_as_it_is(llama):
    import transformers

    how = transformers.BitsAndBytesConfig(**asking.INT8, llm_int8_skip_modules=["mlp"])
    before = how.to_dict()
    with patches.applied(ID):
        transformers.LlamaForCausalLM.from_pretrained(llama, quantization_config=how, device_map="cpu")
    assert how.to_dict() == before


def test_a_list_that_is_obeyed_already_gives_the_same_model(llama):
    how = {**asking.NF4, "llm_int8_skip_modules": ["q_proj", "lm_head"]}
    expected = asking.load(llama, how)
    with patches.applied(ID):
        model = asking.load(llama, how)
    assert model.config.to_dict() == expected.config.to_dict()
    assert torch.equal(asking.logits(model), asking.logits(expected))


def test_a_name_that_matches_nothing_is_said_with_the_nearest(llama):
    with patches.applied(ID), record_logs() as said:
        asking.load(llama, {**asking.INT8, "llm_int8_skip_modules": ["layer.1", "lm_head"]})
    (record,) = said
    assert "'layer.1'" in record.getMessage() and "layers.1" in record.getMessage()


@pytest.mark.parametrize("name", ["", ".", 3], ids=repr)
def test_what_is_no_name_is_refused(llama, name):
    with patches.applied(ID), pytest.raises(ValueError, match="names no module"):
        asking.load(llama, {**asking.INT8, "llm_int8_skip_modules": [name]})
