"""A model with layers on the disk, saved into the folder that it reads from: nothing is lost, and it goes on."""

from __future__ import annotations

import gc
import os
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.repairs.patched_once import unpatched  # noqa: F401
from tests.repairs.transformers.on_disk import logits, make

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

ON_CPU = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
PLACES = {**dict.fromkeys(ON_CPU, "cpu"), "model.layers": "disk"}
BEFORE, AFTER = "80KB", {"one file": {}, "as many": {"max_shard_size": "80KB"}, "more": {"max_shard_size": "40KB"}}
FORMS = ["plain", "quantized", "quantized now"] if transformers.__version__ >= "5" else ["plain"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A plain and a quantized checkpoint in shards."""
    folder = tmp_path_factory.mktemp("made")
    make().save_pretrained(folder / "plain", max_shard_size=BEFORE)
    if len(FORMS) > 1:
        load(folder / "plain", "quantized now", {"": "cpu"}).save_pretrained(
            folder / "quantized", max_shard_size="30KB"
        )
    return folder


def load(folder, form, places=PLACES, **options):
    if form == "quantized now":
        options["quantization_config"] = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return transformers.LlamaForCausalLM.from_pretrained(folder, device_map=places, **options)


def daily(form, name):
    """Each once."""
    same = ["plain", "quantized", "quantized now"].index(form) == list(AFTER).index(name)
    return [] if same else [pytest.mark.release("the same with another form or number of shards")]


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.fixture
def checkpoint(form, made, tmp_path):
    return shutil.copytree(made / ("quantized" if form == "quantized" else "plain"), tmp_path / "model")


@pytest.mark.parametrize(
    "form, size",
    [
        pytest.param(form, size, id=f"{form}-{name}", marks=daily(form, name))
        for form in FORMS for name, size in AFTER.items()
    ],
    indirect=["form"],
)  # fmt: skip
def test_in_place(form, size, checkpoint, tmp_path):
    model = load(checkpoint, form, offload_folder=tmp_path / "off")
    expected = logits(model)
    for _ in range(2):  # the second time it reads from files beside
        model.save_pretrained(tmp_path / "elsewhere", **size)
        model.save_pretrained(checkpoint, **size)
        assert torch.equal(logits(model), expected)
    assert sorted(os.listdir(checkpoint)) == sorted({*os.listdir(tmp_path / "elsewhere"), *_index(checkpoint)})
    for name in os.listdir(tmp_path / "elsewhere"):
        if name.endswith(".safetensors"):
            one, two = load_file(tmp_path / "elsewhere" / name), load_file(checkpoint / name)
            assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    del model
    gc.collect()
    assert torch.equal(logits(load(checkpoint, form.partition(" now")[0], {"": "cpu"})), expected)
    assert not list(tmp_path.glob("quantized-*")), "the old files go with the model"


def _index(folder):
    """transformers leaves that of shards where there is one file now."""
    return {"model.safetensors.index.json"} & set(os.listdir(folder))


def test_a_save_that_fails(form, checkpoint, tmp_path):
    """By a limit to the size of a file; then it is as it was."""
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    model = load(checkpoint, form, offload_folder=tmp_path / "off")
    expected = logits(model)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        with pytest.raises(Exception, match="File too large"):
            model.save_pretrained(checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before
    assert torch.equal(logits(model), expected)
    model.save_pretrained(checkpoint)
    assert torch.equal(logits(model), expected)


def test_to_another_folder_nothing_is_kept(form, checkpoint, tmp_path):
    model = load(checkpoint, form, offload_folder=tmp_path / "off")
    before = sorted(os.listdir(checkpoint))
    model.save_pretrained(tmp_path / "elsewhere")
    assert sorted(os.listdir(checkpoint)) == before
    assert not list(tmp_path.glob("quantized-*"))
