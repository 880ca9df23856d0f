"""A quantized model on the disk whose folder is full, read-only or deleted, or whose file is cut short.

Each fault is an error that says what to do, leaves nothing behind, and a second try works.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import threading
import time
import warnings

import pytest
import torch

from tests.repairs.patched_once import unpatched  # noqa: F401
from tests.repairs.transformers.on_disk import IDS, PLACES, assert_a_second_try_works, left, load, logits, make

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A plain one, the same in shards, and one that is quantized."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = make()
    model.save_pretrained(folder / "plain")
    model.save_pretrained(folder / "shards", max_shard_size="80KB")
    load(folder / "plain", {"": "cpu"}).save_pretrained(folder / "quantized")
    return folder


@pytest.fixture(scope="module")
def expected(checkpoints, tmp_path_factory):
    return logits(load(checkpoints / "plain", offload_folder=tmp_path_factory.mktemp("off")))


@pytest.fixture
def off(tmp_path):
    return tmp_path / "off"


def test_a_folder_that_becomes_full(checkpoints, off, expected):
    """By a limit to the size of a file, which needs no file system of its own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        with pytest.raises(
            OSError, match=r"'model.layers.0.*' could not be written to offload_folder=.* free: .*Make room"
        ):
            load(checkpoints / "plain", offload_folder=off)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_a_second_try_works(checkpoints / "plain", off, expected)


def test_a_folder_that_becomes_full_with_a_weight_that_is_not_quantized(checkpoints, off, expected):
    """transformers writes it, here because it converts the embedding that it reads from a pickled checkpoint."""
    pickled = off.parent / "pickled"
    shutil.copytree(checkpoints / "plain", pickled)
    from safetensors.torch import load_file

    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        with pytest.raises(OSError, match="'model.embed_tokens.weight' could not be written to offload_folder="):
            load(pickled, {"": "cpu", "model.embed_tokens": "disk"}, offload_folder=off)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_a_second_try_works(checkpoints / "plain", off, expected)


def test_a_folder_on_a_file_system_that_is_full_or_read_only(checkpoints, off, expected):
    off.mkdir()
    for options, message in (
        ("size=40k", "No space left"),
        ("ro", "offload_folder=.* cannot be written to .*Read-only"),
    ):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", off], capture_output=True)
        if done.returncode:
            pytest.skip(f"mounting a file system is not allowed here: {done.stderr.decode().strip()}")
        try:
            with pytest.raises(OSError, match=message):
                load(checkpoints / "plain", offload_folder=off)
            assert left(off) == []
        finally:
            subprocess.run(["umount", off], check=True)
    assert_a_second_try_works(checkpoints / "plain", off, expected)


def lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def before_the_forward(model, delete, out):
    delete()
    logits(model)


def inside_of_a_forward(model, delete, out):
    model.model.layers[0].register_forward_hook(lambda *_: delete())
    logits(model)


def before_the_backward(model, delete, out):
    loss = lora(model)(input_ids=IDS, labels=IDS).loss
    delete()
    loss.backward()


def before_it_is_saved(model, delete, out):
    delete()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(out)


@pytest.mark.parametrize(
    "use",
    [before_the_forward, inside_of_a_forward, before_the_backward, before_it_is_saved],
    ids=lambda use: use.__name__,
)
def test_a_folder_that_is_deleted(use, checkpoints, off, expected, tmp_path):
    model = load(checkpoints / "plain", offload_folder=off)
    with pytest.raises(FileNotFoundError, match=r"'model.layers.\d.*weight' is on the disk in .*Load the model again"):
        use(model, lambda: shutil.rmtree(off, ignore_errors=True), tmp_path / "saved")
    assert not list(tmp_path.glob("saved/*.safetensors")), "part of a model was saved"
    assert_a_second_try_works(checkpoints / "plain", off, expected)


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("kind", ["plain", "shards", "quantized"])
def test_a_checkpoint_that_was_not_downloaded_to_the_end(kind, checkpoints, off, expected):
    folder = off.parent / kind
    shutil.copytree(checkpoints / kind, folder)
    file = sorted(folder.glob("*.safetensors"))[-1]
    cut(file)
    with pytest.raises(Exception, match=rf"{file} \(\d+ bytes\) is not a complete safetensors file") as raised:
        load(folder, offload_folder=off)
    assert type(raised.value).__name__ == "SafetensorError"
    del raised
    assert_a_second_try_works(checkpoints / "plain", off, expected)


def test_a_pickled_checkpoint_that_was_not_downloaded_to_the_end(checkpoints, off, expected):
    from safetensors.torch import load_file

    folder = off.parent / "pickled"
    shutil.copytree(checkpoints / "plain", folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    cut(folder / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"pytorch_model.bin \(\d+ bytes\) is not a complete file of torch.save"):
        load(folder, offload_folder=off)
    assert_a_second_try_works(checkpoints / "plain", off, expected)


def test_a_folder_that_is_deleted_while_the_model_is_loaded(checkpoints, off, expected):
    """By a program that cleans up beside it."""
    late = time.monotonic() + 60

    def delete():
        while len(list(off.glob("*/*.safetensors"))) < 3 and time.monotonic() < late:
            pass
        shutil.rmtree(off, ignore_errors=True)

    deleting = threading.Thread(target=delete)
    deleting.start()
    try:
        with pytest.raises(
            FileNotFoundError, match=r"'model.layers.\d.*weight' (could not be written to|is on the disk in) .*again"
        ):
            logits(load(checkpoints / "plain", offload_folder=off))
    finally:
        deleting.join()
    assert_a_second_try_works(checkpoints / "plain", off, expected)


def test_a_file_that_is_cut_short_afterwards(checkpoints, off, expected):
    model = load(checkpoints / "plain", offload_folder=off)
    (file,) = off.glob("*/model.layers.1.mlp.up_proj.weight.safetensors")
    cut(file)
    with pytest.raises(
        RuntimeError, match=rf"'model.layers.1.mlp.up_proj.weight' is on the disk in {file}.* was truncated"
    ):
        logits(model)
    del model
    assert_a_second_try_works(checkpoints / "plain", off, expected)


def test_a_checkpoint_that_is_written_anew(checkpoints, tmp_path):
    """Another model of the same shapes, such as a merged one, would give its numbers."""
    shutil.copytree(checkpoints / "quantized", tmp_path / "quantized")
    model = load(tmp_path / "quantized")
    expected = logits(model)
    assert torch.equal(logits(model), expected)
    make(seed=1).save_pretrained(tmp_path / "other")
    load(tmp_path / "other", {"": "cpu"}).save_pretrained(tmp_path / "quantized")
    with pytest.raises(RuntimeError, match="the checkpoint that the model was loaded from, and the file was rewritten"):
        logits(model)


def test_a_map_that_names_what_is_not_there(checkpoints, off, expected):
    with pytest.raises(
        ValueError, match="names 'model.layer.1', which LlamaForCausalLM does not have; .*'model.layers.1'"
    ):
        load(checkpoints / "plain", {**PLACES, "model.layer.1": "cpu"}, offload_folder=off)
    assert_a_second_try_works(checkpoints / "plain", off, expected)


def test_a_map_that_leaves_something_out(checkpoints, off, expected):
    with pytest.raises(ValueError, match="The device_map has no entry for 'model.embed_tokens.weight'"):
        load(checkpoints / "plain", {"model.layers": "disk", "lm_head": "cpu", "model.norm": "cpu"}, offload_folder=off)
    assert_a_second_try_works(checkpoints / "plain", off, expected)


@pytest.mark.parametrize("kind", ["plain", "shards"])
def test_no_folder_where_one_is_needed(kind, checkpoints, tmp_path):
    with pytest.raises(
        ValueError, match=r"sends 14 weights to the disk \('model.layers.0.*they are quantized .*offload_folder"
    ):
        load(checkpoints / kind)


def test_no_folder_where_none_is_needed(checkpoints, tmp_path):
    """A quantized checkpoint is read from where it lies."""
    before = sorted(checkpoints.rglob("*"))
    assert torch.isfinite(logits(load(checkpoints / "quantized"))).all()
    assert sorted(checkpoints.rglob("*")) == before
