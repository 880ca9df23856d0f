"""A quantized model with layers on CPU and disk is the model that is loaded whole; what cannot be had says so."""

from __future__ import annotations

import gc

import accelerate
import pytest
import torch
from safetensors.torch import load_file

from tests.repairs.patched_once import unpatched  # noqa: F401
from tests.repairs.peft.offloading import device_map, logits, quantization, save_base, whole

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

PATCH = "transformers-device-map-refused"
ON_DISK = {"": "cpu", "model.layers.1": "disk"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "model")


def load(folder, kind, places, **options):
    given = quantization(kind, **options.pop("how", {}))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map=places, **given, **options)


@pytest.mark.parametrize("quantized", [False, True], ids=["plain checkpoint", "quantized checkpoint"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_model_that_is_loaded_whole_and_offloaded(kind, quantized, base, tmp_path):
    model, folder = whole(base, kind), base
    model.save_pretrained(tmp_path / "whole")
    accelerate.dispatch_model(model, device_map("cpu"), main_device="cpu", offload_dir=tmp_path / "1", force_hooks=True)
    folder, precision = (tmp_path / "whole", "plain") if quantized else (base, kind)
    loaded = load(folder, precision, device_map("cpu"), offload_folder=tmp_path / "2")
    assert loaded.model.layers[1].mlp.up_proj.weight.is_meta
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "whole"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_flag_means_what_it_meant(kind, base, tmp_path):
    how = {"llm_int8_enable_fp32_cpu_offload": True}
    model = load(base, kind, device_map("cpu"), how=how, offload_folder=tmp_path)
    assert type(model.model.layers[1].mlp.up_proj) is torch.nn.Linear
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_quantized_loads_as_before(base, tmp_path):
    model = load(base, "plain", device_map("cpu"), offload_folder=tmp_path)
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    assert torch.equal(logits(model), logits(load(base, "plain", {"": "cpu"})))


def test_a_quantized_checkpoint_needs_no_folder(base, tmp_path):
    whole(base, "nf4").save_pretrained(tmp_path)
    before = sorted(tmp_path.iterdir())
    model = load(tmp_path, "plain", ON_DISK)
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    assert torch.isfinite(logits(model)).all()
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "places, message",
    [
        ({"model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}, "no entry for 'model.embed_tokens.weight'"),
        ({"": "cpu", "model.layers.7": "disk"}, "names 'model.layers.7', which LlamaForCausalLM does not have"),
        (
            {"": "cpu", "model.layers.0": "disk", "model.layers.1": "dsk"},
            "sends 'model.layers.1' to 'dsk', which is not",
        ),
        ({"": "cpu", "model.layers.0": "disk", "model.norm": None}, "sends 'model.norm' to None, which is not a place"),
        ({"": "cpu", "model.layers.0": "disk", "lm_head": "meta"}, "sends 'lm_head' to 'meta', which is not a place"),
        ({"": "cpu", "model.layers.0": "disk", "lm_head": 77}, '"disk" and the devices that torch finds here: '),
        (ON_DISK, "offload_folder"),
    ],
)
def test_what_cannot_be_loaded(places, message, base):
    with pytest.raises(ValueError, match=message):
        load(base, "nf4", places)


def test_a_map_counts_quantized_sizes(base, tmp_path):
    """transformers keeps room for the weights before they are quantized: by its map only the embedding fits, a fifth."""
    room = 42_240
    model = load(base, "int8", "auto", max_memory={"cpu": room}, offload_folder=tmp_path)
    assert room / 2 < sum(p.nbytes for p in model.parameters() if not p.is_meta) <= room
    assert torch.isfinite(logits(model)).all()


def test_a_gap_beside_tied_weights(tmp_path):
    """transformers 4 looks for both in the map, and names a module that has no name."""
    folder = save_base(tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(ValueError, match="no entry for 'lm_head.weight'"):
        load(folder, "nf4", {"model": "cpu", "model.layers": "disk"})


def test_a_folder_that_cannot_be_written(base, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        load(base, "nf4", ON_DISK, offload_folder=tmp_path / "file")


def test_two_models_in_one_folder(base, tmp_path):
    one = load(base, "nf4", ON_DISK, offload_folder=tmp_path)
    expected = logits(one)
    other = save_base(tmp_path / "other", rope_theta=1.0)
    again = transformers.AutoModelForCausalLM.from_pretrained(other)
    torch.nn.init.normal_(again.model.layers[1].mlp.up_proj.weight)
    again.save_pretrained(other)
    two = load(other, "nf4", ON_DISK, offload_folder=tmp_path)
    assert not torch.equal(logits(two), expected)
    assert torch.equal(logits(one), expected)
    del two, again
    gc.collect()
    assert torch.equal(logits(one), expected)
    del one
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_stopped_while_it_is_loaded(error, base, tmp_path, monkeypatch):
    import safetensors.torch

    calls, upstream = [], safetensors.torch.save_file

    def stop(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise error
        return upstream(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(error) as caught:
        patch.setattr(safetensors.torch, "save_file", stop)
        load(base, "nf4", ON_DISK, offload_folder=tmp_path)
    assert caught.value.__traceback__ is not None, "which holds the frames, and what is in them"
    assert not list(tmp_path.iterdir())
    model = load(base, "nf4", ON_DISK, offload_folder=tmp_path)
    assert torch.isfinite(logits(model)).all()


def test_a_copy_of_the_model_keeps_the_folder(base, tmp_path):
    import copy

    model = load(base, "int8", ON_DISK, offload_folder=tmp_path)
    expected, other = logits(model), copy.deepcopy(model)
    del model
    gc.collect()
    assert torch.equal(logits(other), expected)
