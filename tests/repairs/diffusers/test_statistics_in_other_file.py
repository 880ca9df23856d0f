"""A quantized image model is loaded from several files, wherever the limits between them fall."""

from __future__ import annotations

import json

import pytest
import torch

import patches

from . import image_options

pytest.importorskip("diffusers")

ID = "diffusers-statistics-in-other-file"
LIMITS = range(9_000, 17_000, 500)


def splits(folder):
    """How many 4-bit weights of the checkpoint have statistics in another file."""
    files = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
    weights = {name.partition(".weight.")[0] + ".weight" for name in files if ".weight." in name}
    return sum(files[name] != files[weight] for weight in weights for name in files if name.startswith(f"{weight}."))


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
def test_4_bit(flux, tmp_path, double):
    model = image_options.load(flux, {**image_options.NF4, "bnb_4bit_use_double_quant": double})
    expected = image_options.output(model)
    for limit in LIMITS:
        model.save_pretrained(tmp_path, max_shard_size=limit)
        with patches.applied(ID):
            again = image_options.load(tmp_path)
        assert torch.equal(image_options.output(again), expected)
    assert splits(tmp_path) > 0


@pytest.mark.skipif("int8" not in image_options.BOTH, reason="bitsandbytes before 0.48 quantizes INT8 weights again")
def test_int8(flux, tmp_path):
    model = image_options.load(flux, image_options.INT8)
    expected = image_options.output(model)
    for limit in LIMITS:
        model.save_pretrained(tmp_path, max_shard_size=limit)
        with patches.applied(ID):
            assert torch.equal(image_options.output(image_options.load(tmp_path)), expected)


def test_in_parallel(flux, tmp_path, monkeypatch):
    model = image_options.load(flux, image_options.NF4)
    model.save_pretrained(tmp_path, max_shard_size=15_000)
    monkeypatch.setattr("diffusers.models.modeling_utils.HF_ENABLE_PARALLEL_LOADING", True, raising=False)
    with patches.applied(ID):
        again = image_options.load(tmp_path)
    assert splits(tmp_path) > 0 and torch.equal(image_options.output(again), image_options.output(model))


def test_files_of_pickles(flux, tmp_path):
    model = image_options.load(flux, image_options.NF4)
    model.save_pretrained(tmp_path, max_shard_size=15_000, safe_serialization=False)
    with patches.applied(ID):
        again = image_options.load(tmp_path, use_safetensors=False)
    assert torch.equal(image_options.output(again), image_options.output(model))


def test_a_plain_model_of_several_files_is_quantized_as_before(flux, tmp_path):
    image_options.load(flux).save_pretrained(tmp_path, max_shard_size=100_000)
    expected = image_options.packed(image_options.load(tmp_path, image_options.NF4))
    with patches.applied(ID):
        found = image_options.packed(image_options.load(tmp_path, image_options.NF4))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_statistics_that_no_file_holds_give_the_same_error(flux, tmp_path):
    from safetensors.torch import load_file, save_file

    image_options.load(flux, image_options.NF4).save_pretrained(tmp_path, max_shard_size=15_000)
    lost = "x_embedder.weight.quant_state.bitsandbytes__nf4"
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop(lost, None) is not None:
            save_file(tensors, file, {"format": "pt"})
    with patches.applied(ID), pytest.raises(ValueError, match=r"x_embedder\.weight does not contain"):
        image_options.load(tmp_path)
