"""``quantization_config=None`` for checkpoints that are quantized, by bitsandbytes or by others, and for plain ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import patches

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

ID = "transformers-quantization-config-none"
HOW = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
AUTO = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
"""Each has a copy of its own of ``from_pretrained``."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint, one of INT8 and one of 4 bits."""
    path = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    size = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=1, pad_token_id=0, **size)
    transformers.LlamaForCausalLM(config).save_pretrained(path / "plain")
    for name, how in HOW.items():
        asked = transformers.BitsAndBytesConfig(**how)
        model = transformers.LlamaForCausalLM.from_pretrained(
            path / "plain", quantization_config=asked, device_map="cpu"
        )
        model.save_pretrained(path / name)
    return path


def load(path: Path, name: str = "AutoModelForCausalLM", **options: Any) -> Any:
    torch.manual_seed(0)  # the head that a classifier does not find
    return getattr(transformers, name).from_pretrained(path, device_map="cpu", **options).eval()


@pytest.mark.parametrize("kind", HOW)
@pytest.mark.parametrize("name", AUTO)
def test_it_is_what_leaving_it_out_is(folder: Path, kind: str, name: str) -> None:
    ids = torch.arange(8)[None]
    expected = load(folder / kind, name)
    with patches.applied(ID):
        loaded = load(folder / kind, name, quantization_config=None)
    assert loaded.config.to_dict() == expected.config.to_dict()
    assert [type(module) for module in loaded.modules()] == [type(module) for module in expected.modules()]
    with torch.no_grad():
        assert torch.equal(loaded(ids)[0], expected(ids)[0])


def test_one_that_is_asked_for_is_obeyed(folder: Path) -> None:
    asked = transformers.BitsAndBytesConfig(**HOW["nf4"], bnb_4bit_compute_dtype=torch.bfloat16)
    with patches.applied(ID):
        plain = load(folder / "plain", quantization_config=asked)
    assert type(plain.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"


@pytest.mark.parametrize("also", ({}, {"quantization_config": None}), ids=("left out", "None"))
def test_a_plain_checkpoint_is_loaded_as_before(folder: Path, also: dict[str, Any]) -> None:
    before = load(folder / "plain", **also)
    with patches.applied(ID):
        after = load(folder / "plain", **also)
    assert vars(after.config).keys() == vars(before.config).keys()
    assert after.config.to_dict() == before.config.to_dict()
    assert all(map(torch.equal, after.state_dict().values(), before.state_dict().values()))


def test_a_checkpoint_of_another_method_is_loaded_as_before(folder: Path, tmp_path: Path) -> None:
    """BitNet's hold plain weights beside a configuration that None takes away."""
    load(folder / "plain").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "bitnet"}}))
    with patches.applied(ID):
        model = load(tmp_path, quantization_config=None)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert model.config.quantization_config is None


def test_a_configuration_alone_loses_it_where_that_is_asked_for(folder: Path) -> None:
    with patches.applied(ID):
        config = transformers.AutoConfig.from_pretrained(folder / "int8", quantization_config=None)
    assert config.quantization_config is None


@pytest.mark.parametrize("kind", HOW)
def test_a_pipeline_is_what_it_is_without_it(folder: Path, kind: str) -> None:
    def pipe(**options: Any) -> Any:
        tokenizer = transformers.ByT5Tokenizer()
        return transformers.pipeline(
            "text-generation", str(folder / kind), tokenizer=tokenizer, device_map="cpu", model_kwargs=options
        ).model.eval()

    ids = torch.arange(8)[None]
    expected = pipe()
    with patches.applied(ID):
        loaded = pipe(quantization_config=None)
    assert [type(module) for module in loaded.modules()] == [type(module) for module in expected.modules()]
    with torch.no_grad():
        assert torch.equal(loaded(ids)[0], expected(ids)[0])


def test_a_class_that_comes_with_the_checkpoint_keeps_its_quantization(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    path = tmp_path / "own"
    shutil.copytree(folder / "int8", path)
    (path / "own_model.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((path / "config.json").read_text())
    own = {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnModel"}
    (path / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": own}))
    with patches.applied(ID):
        loaded = load(path, quantization_config=None, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnModel"
    assert type(loaded.model.layers[0].mlp.up_proj).__name__ == "Linear8bitLt"
