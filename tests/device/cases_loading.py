"""A quantized model that ``from_pretrained`` loads over the device, the CPU and the disk is the whole one, to the bit."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import patches
from patches.engine.gate import satisfied
from tests.device import watch
from tests.device.models import QUANTIZED, add_lora, assert_same_training, half, load, logits, quantized_layers, train

pytestmark = pytest.mark.usefixtures("patched")

MAPS = {
    "cpu": lambda device, other: half(device, "cpu"),
    "disk": lambda device, other: half(device, "disk"),
    "inside one another": lambda device, other: {"": device, "model.layers.1": "disk", "model.layers.1.mlp": "cpu"},
    "numbers": lambda device, other: {**half(0, "cpu"), "model.embed_tokens": "disk", "lm_head": "disk"},
    "torch.device": lambda device, other: half(torch.device(device), "disk"),
    "two devices": lambda device, other: {**half(device, other), "lm_head": "cpu", "model.layers.0": "disk"},
    "single weights": lambda device, other: {
        "": device, "model.layers.0.mlp.up_proj.weight": "cpu", "model.layers.1.self_attn.q_proj.weight": "disk",
    },
    "all but the norms": lambda device, other: {"": "disk", "model.norm": device, "model.embed_tokens": "cpu"},
}  # fmt: skip
CHECKPOINTS = ("one file", "shards", "pickled", "quantized", "quantized shards")


@pytest.fixture(scope="module")
def checkpoints(llama: Path, tmp_path_factory: pytest.TempPathFactory):
    made: dict[tuple[str, str], Path] = {}

    def folder(kind: str, form: str) -> Path:
        plain = not form.startswith("quantized")
        key = ("" if plain else kind, form)
        if form == "one file":
            return llama
        if key not in made:
            made[key] = tmp_path_factory.mktemp("checkpoint")
            size = {"max_shard_size": "40KB"} if form.endswith("shards") else {}
            if form == "pickled":
                _pickle(llama, made[key])
            else:
                load(llama, "plain" if plain else kind, {"": "cpu"}).save_pretrained(made[key], **size)
        return made[key]

    return folder


def _pickle(llama: Path, folder: Path) -> None:
    torch.save(load_file(llama / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "config.json").write_bytes((llama / "config.json").read_bytes())


def get(folder: Path, kind: str, form: str, device_map, **options):
    return load(folder, "plain" if form.startswith("quantized") else kind, device_map, **options)


def product():
    """All of it before a release; every day each pair of map and checkpoint once, with one of the kinds."""
    for m, places in enumerate(MAPS):
        for c, form in enumerate(CHECKPOINTS):
            for k, kind in enumerate(QUANTIZED):
                daily = (m + c) % len(QUANTIZED) == k and (m + c) % 2 == 0
                marks = [] if daily else [pytest.mark.release("the same map or checkpoint with another kind")]
                yield pytest.param(places, kind, form, marks=marks)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("places, kind, form", list(product()))
def test_loaded(places, kind, form, checkpoints, device, other, tmp_path, by_the_name_of_cuda):
    folder = checkpoints(kind, form)
    whole = get(folder, kind, form, {"": device})
    expected = logits(whole, device)
    device_map = MAPS[places](device, other)
    model = get(folder, kind, form, device_map, offload_folder=tmp_path / "off")
    assert model.hf_device_map == device_map
    assert len(list(quantized_layers(model))) == len(list(quantized_layers(whole)))
    assert any(p.is_meta for p in model.parameters())
    for _ in range(2):
        assert torch.equal(logits(model, device), expected)
    if form.startswith("quantized"):
        assert not list(tmp_path.rglob("*_proj*")), "packed weights that a checkpoint has are not written again"
    model.save_pretrained(tmp_path / "again")
    whole.save_pretrained(tmp_path / "whole")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "whole"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) and one[name].dtype == two[name].dtype for name in one)
    del model
    watch.held()
    assert not list(tmp_path.rglob("quantized-*")), "what was written goes with the model"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["no", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_trained(kind, checkpointing, llama, device, tmp_path, by_the_name_of_cuda):
    whole = train(add_lora(load(llama, kind, {"": device}), checkpointing), device)
    device_map = {**half(device, "disk"), "model.layers.0.mlp": "cpu", "model.layers.0.self_attn": device}
    del device_map["model.layers.0"]
    model = add_lora(
        load(llama, kind, {**device_map, "model.layers.0": device}, offload_folder=tmp_path), checkpointing
    )
    assert_same_training(train(model, device), whole)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_where_it_computes(kind, llama, device, tmp_path, by_the_name_of_cuda):
    """One weight at a time is on the device beside what stays there, and each is quantized there."""
    load(llama, kind, {"": device})  # code books are made once
    before = watch.held()
    with watch.watch() as seen, watch.peak() as peak:
        model = load(llama, kind, {**half(device, "disk"), "model.layers.0": "cpu"}, offload_folder=tmp_path)
    stays = watch.held() - before
    largest = max(layer.in_features * layer.out_features for layer in quantized_layers(model))
    assert peak[0] <= stays + 7 * largest, "what is read, and for INT8 its copy in float16 and the codes"
    quantized = [name for name in seen.kernels if "quantize" in name or "vectorwise" in name]
    assert len(quantized) >= len(list(quantized_layers(model)))


STORED = {
    "fp4": ("fp4", torch.uint8), "fp4 nested": ("fp4-nested", torch.uint8), "bfloat16": ("nf4", torch.bfloat16),
    "float16": ("nf4", torch.float16), "float32 nested": ("nf4-nested", torch.float32), "fp4 float32": ("fp4", torch.float32),
}  # fmt: skip
EACH_DAY = ("fp4 nested", "bfloat16")


@pytest.mark.parametrize(
    "stored", [name if name in EACH_DAY else pytest.param(name, marks=pytest.mark.release("two")) for name in STORED]
)
def test_each_way_to_store_4_bits(stored, llama, device, tmp_path, by_the_name_of_cuda):
    """Of a plain checkpoint, and of a quantized one; packed weights in the dtype that they are to be stored in."""
    kind, storage = STORED[stored]
    if not satisfied("bitsandbytes>=0.47") and (kind.startswith("fp4") or storage != torch.uint8):
        pytest.skip("before 0.47 a CPU has kernels for nf4 in uint8 storage only")
    how = {"quantized": {"bnb_4bit_quant_storage": storage}}
    device_map = {"": device, "model.layers.0.mlp": "cpu", "model.layers.1": "disk"}
    whole = load(llama, kind, {"": device}, **how)
    expected = logits(whole, device)
    whole.save_pretrained(tmp_path / "whole")
    one = load(llama, kind, device_map, offload_folder=tmp_path / "off", **how)
    two = load(tmp_path / "whole", "plain", device_map, offload_folder=tmp_path / "off")
    saved = load_file(tmp_path / "whole" / "model.safetensors")
    for model, name in ((one, "one"), (two, "two")):
        for layer in quantized_layers(model):
            assert layer.weight.dtype == storage
        assert torch.equal(logits(model, device), expected)
        model.save_pretrained(tmp_path / name)
        again = load_file(tmp_path / name / "model.safetensors")
        assert again.keys() == saved.keys()
        wrong = [key for key in saved if again[key].dtype != saved[key].dtype or not same_bytes(again[key], saved[key])]
        assert not wrong


def same_bytes(one, other):
    """Two packed values in a floating point dtype may be a NaN."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.release("nf4"))])
def test_modules_to_save(kind, llama, device, tmp_path, by_the_name_of_cuda):
    also = {"modules_to_save": ["lm_head"]}
    whole = train(add_lora(load(llama, kind, {"": device}), **also), device)
    model = add_lora(load(llama, kind, half(device, "disk"), offload_folder=tmp_path), **also)
    assert_same_training(train(model, device), whole)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Two layers, each with a router and four experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = dict(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, num_key_value_heads=1)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, **sizes
    )
    folder = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.one_in(4)
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("form", ["plain checkpoint", "quantized checkpoint"])
@pytest.mark.parametrize("kind", ["nf4-nested", pytest.param("nf4", marks=pytest.mark.release("nested")), "int8"])
def test_quantized_experts(kind, form, place, mixture, device, tmp_path, by_the_name_of_cuda):
    """On the CPU and on the disk, one parameter in a file; without a folder for it, an error before anything is read."""
    with patches.quantize_experts():
        eager = {"experts_implementation": "eager"}  # the simulated device has no grouped products
        with watch.watch() as whole_seen:
            whole = load(mixture, kind, {"": device}, **eager)
        whole.save_pretrained(tmp_path / "whole")
        folder, given = (mixture, kind) if form == "plain checkpoint" else (tmp_path / "whole", "plain")
        with watch.watch() as seen:
            model = load(folder, given, {"": device, "model.layers.1": place}, offload_folder=tmp_path / "off", **eager)
        assert form != "plain checkpoint" or quantizations(seen) == quantizations(whole_seen)
        expected = logits(whole, device)
        for _ in range(2):
            assert torch.equal(logits(model, device), expected)
        assert all(p.is_meta for p in model.model.layers[1].mlp.experts.parameters())
        model.save_pretrained(tmp_path / "again")
        with pytest.raises(ValueError, match=r"to the disk.*offload_folder="):
            load(folder, given, {"": device, "model.layers.1": "disk"})
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "whole"))
    assert one.keys() == two.keys()
    assert [key for key in one if one[key].dtype != two[key].dtype or not same_bytes(one[key], two[key])] == []
    expected = step(whole, device)
    assert torch.equal(step(model, device), expected)
    if place == "disk":
        assert len(list(tmp_path.rglob("*experts*.safetensors"))) == 2
        copy.deepcopy(model)
        patches.inspect(model)
        next(tmp_path.rglob("*experts.down_proj.safetensors")).unlink()
        with pytest.raises(OSError, match="experts.down_proj"):
            logits(model, device)
    del model
    watch.held()
    assert not list(tmp_path.rglob("quantized-*"))


def quantizations(seen):
    """How many there were on the device."""
    return len([name for name in seen.kernels if re.search("quantize_4bit|vectorwise_quant", name)])


def step(model, device):
    """The gradient at the input of a forward and a backward."""
    torch.manual_seed(0)
    embedded = torch.randn(1, 4, 64, dtype=torch.bfloat16).to(device).requires_grad_()
    model(inputs_embeds=embedded).logits.float().square().sum().backward()
    return embedded.grad.cpu()
