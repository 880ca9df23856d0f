"""Maps of ``from_pretrained`` for a quantized model that does not fit: what lies where, and how much of each device is used."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from patches.engine.gate import satisfied
from patches.repairs.reproducers.tiny_models import in_dtype
from tests.device import watch
from tests.device.models import (
    QUANTIZED, add_lora, assert_same_training, batch, load, logits, quantization, quantized_layers, save_llama, train,
)  # fmt: skip

pytestmark = [pytest.mark.one_in(4), pytest.mark.usefixtures("patched", "by_the_name_of_cuda")]

BIG = 12
"""Decoder layers of a model that does not fit."""


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("big"), layers=BIG)


def held_by(make):
    before = watch.held()
    model = make()
    return model, watch.held() - before


@pytest.mark.parametrize("share, cpu", [(0.6, 10**9), (0.45, 20_000)], ids=["cpu", "cpu and disk"])
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(
    "auto",
    [
        "auto",
        *(
            pytest.param(name, marks=pytest.mark.release("auto"))
            for name in ("balanced", "balanced_low_0", "sequential")
        ),
    ],
)
def test_a_map_by_the_sizes_of_quantized_layers(auto, kind, share, cpu, big, device, tmp_path):
    whole, size = held_by(lambda: load(big, kind, {"": device}))
    expected = logits(whole, device)
    limit = int(share * size)
    before = watch.held()
    with watch.peak() as peak:
        model = load(big, kind, auto, max_memory={0: limit, "cpu": cpu}, offload_folder=tmp_path)
    places = set(model.hf_device_map.values())
    assert places == ({0, "cpu"} if cpu > size else {0, "cpu", "disk"})
    for _ in range(2):
        assert torch.equal(logits(model, device), expected)
        assert 0.8 * limit <= watch.held() - before <= limit
    listed = 1024 * len(list(quantized_layers(model)))  # accelerate asks for a state dict, to check the map
    assert peak[0] <= limit + 6 * 64 * 128 + listed


@pytest.mark.parametrize("kind", QUANTIZED)
def test_what_fits_quantized_is_not_offloaded(kind, big, device):
    whole, size = held_by(lambda: load(big, kind, {"": device}))
    model = load(big, kind, "auto", max_memory={0: int(1.01 * size), "cpu": 10**9})
    assert {parameter.device for parameter in model.parameters()} == {torch.device(device)}
    assert torch.equal(logits(model, device), logits(whole, device))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_map_for_two_devices(kind, big, device, other, tmp_path):
    """Both are filled: the layer that the first cannot hold is divided, and so is the one that the second cannot."""
    whole, size = held_by(lambda: load(big, kind, {"": device}))
    memory = {0: int(0.4 * size), 1: int(0.3 * size), "cpu": 10**9}
    before = [watch.held(at) for at in (0, 1)]
    model = load(big, kind, "auto", max_memory=memory)
    assert set(model.hf_device_map.values()) == {0, 1, "cpu"}
    for _ in range(2):
        assert torch.equal(logits(model, device), logits(whole, device))
        assert all(0.9 * memory[at] <= watch.held(at) - before[at] <= memory[at] for at in (0, 1))


@pytest.mark.parametrize("share", [0.6, 0.97])
def test_what_transformers_keeps_in_float32_counts(share, device, tmp_path):
    """T5's wo, of a model in float16. Near the limit, transformers alone takes it for a model that fits."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = dict(vocab_size=64, d_model=64, d_kv=32, d_ff=256, num_layers=4, num_heads=2)
    T5ForConditionalGeneration(T5Config(**sizes)).half().save_pretrained(tmp_path / "plain")

    def get(places, **also):
        also = {**in_dtype(torch.float16), "offload_folder": tmp_path / "off", **also}
        return T5ForConditionalGeneration.from_pretrained(
            tmp_path / "plain", device_map=places, quantization_config=quantization("nf4"), **also
        )

    _, size = held_by(lambda: get({"": device}))
    limit = int(share * size)
    model, held = held_by(lambda: get("auto", max_memory={0: limit, "cpu": 10**9}))
    assert set(model.hf_device_map.values()) == {0, "cpu"}
    assert 0.8 * limit <= held <= limit


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("untied", [True, False])
def test_a_head_that_only_the_checkpoint_unties_counts(untied, file, device, tmp_path):
    """As T5 v1.1 has: transformers 5 declares every T5 as tied, and ties what the checkpoint has with equal values."""
    from transformers import T5Config, T5ForConditionalGeneration

    if not satisfied("transformers>=5"):
        pytest.skip("transformers 4 ties what the configuration says, whatever the checkpoint has")
    sizes = dict(vocab_size=512, d_model=64, d_kv=32, d_ff=256, num_layers=4, num_heads=2)
    made = T5ForConditionalGeneration(T5Config(**sizes)).bfloat16()
    made.save_pretrained(tmp_path / "plain")
    state = {name: value.clone() for name, value in made.state_dict().items()}
    if untied:
        state["lm_head.weight"] += 1
    (tmp_path / "plain" / "model.safetensors").unlink()
    (save_file if "safetensors" in file else torch.save)(state, tmp_path / "plain" / file)

    def get(places, **also):
        how = {"quantization_config": quantization("nf4"), **in_dtype(torch.bfloat16), **also}
        return T5ForConditionalGeneration.from_pretrained(tmp_path / "plain", device_map=places, **how)

    whole, size = held_by(lambda: get({"": device}))
    assert (whole.lm_head.weight is not whole.shared.weight) == untied
    for share in (0.75, 0.97):
        model, held = held_by(lambda: get("auto", max_memory={0: int(share * size), "cpu": 10**9}))  # noqa: B023
        assert 0.8 * share * size <= held <= int(share * size)
        del model


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_quantizing_a_weight_takes_no_more_than_a_layer(share, device, tmp_path):
    """Of a Llama with grouped queries, whose largest weight is a quarter of a layer: INT8 needs it twice in 16 bits, and packed."""
    sizes = {"num_key_value_heads": 1, "intermediate_size": 1024}
    folder = save_llama(tmp_path, layers=8, hidden=256, **sizes)
    whole, size = held_by(lambda: load(folder, "int8", {"": device}))
    layer = sum(p.nbytes for p in whole.model.layers[0].parameters())
    limit = int(share * size)
    with watch.peak() as peak:
        _, held = held_by(lambda: load(folder, "int8", "auto", max_memory={0: limit, "cpu": 10**9}))
    listed = 1024 * len(list(quantized_layers(whole)))  # accelerate asks for a state dict, to check the map
    kernel = 256 * 1024  # the simulated one makes the packed weight twice
    assert peak[0] <= limit + layer + listed + kernel
    assert 0.8 * limit <= held <= limit


def test_what_holds_more_than_allowed_does_not_fit(big, device):
    """transformers counts no absmax."""
    _, size = held_by(lambda: load(big, "nf4", {"": device}))
    for share in (0.96, 0.98, 0.99):
        model, held = held_by(lambda: load(big, "nf4", "auto", max_memory={0: int(share * size), "cpu": 10**9}))  # noqa: B023
        assert 0.8 * share * size <= held <= int(share * size)
        del model


TIED = {
    "cpu and disk": lambda device: {"": "cpu", "model.norm": device, "model.layers.1": "disk"},
    "the embedding waits": lambda device: {"": device, "model.embed_tokens": "cpu"},
    "the head waits": lambda device: {"": device, "lm_head": "disk"},
}


@pytest.mark.parametrize("places", TIED)
def test_tied_weights_are_one(places, device, tmp_path):
    """Before a forward and after it, which gives each module a parameter of its own; what is on the device is on it once."""
    folder = save_llama(tmp_path / "plain", tie_word_embeddings=True)
    whole, size = held_by(lambda: load(folder, "nf4", {"": device}))
    whole.save_pretrained(tmp_path / "whole")
    get = lambda: load(folder, "nf4", TIED[places](device), offload_folder=tmp_path / "off")  # noqa: E731
    model, held = held_by(get)
    assert held <= size
    for _ in range(2):
        model.save_pretrained(tmp_path / "again")
        one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "whole"))
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        assert torch.equal(logits(model, device), logits(whole, device))


SHARED = {
    "the embedding is on another device": {"": 0, "shared": 1, "encoder": "disk"},
    "so are embedding and head": {"": 0, "shared": 1, "lm_head": 1, "encoder": "cpu"},
    "so are those that share it": {"shared": 0, "encoder": "disk", "decoder": 1, "lm_head": 1},
}


@pytest.mark.parametrize("places", SHARED)
def test_tied_weights_that_a_map_sends_to_two_devices_are_on_one(places, device, other, tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = dict(vocab_size=64, d_model=64, d_kv=32, d_ff=64, num_layers=2, num_heads=2)
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "plain")

    def run(places):
        how = {"quantization_config": quantization("nf4"), **in_dtype(torch.float32)}
        model = T5ForConditionalGeneration.from_pretrained(
            tmp_path / "plain", device_map=places, offload_folder=tmp_path / "off", **how
        )
        with torch.no_grad():
            return model(input_ids=batch(device), decoder_input_ids=batch(device, 3)).logits.cpu()

    assert torch.equal(run(SHARED[places]), run({"": 0}))


DIVIDED = {
    "on the second": {"model.layers.1": 1, "model.layers.1.mlp": "cpu", "model.layers.1.self_attn.q_proj": "disk"},
    "after the second": {"model.layers.0": 1, "model.layers.1.mlp": "cpu"},
    "all of it waits": {"model.layers.0": 1, "model.layers.1": "disk", "model.layers.1.mlp": "cpu"},
    "checkpoint": {"model.layers.1": 1, "model.layers.1.mlp": "disk"},
}


@pytest.mark.parametrize("places", DIVIDED)
def test_a_divided_layer_computes_on_one_of_two_devices(places, llama, device, other, tmp_path):
    """Its parts that wait compute where the others are, and its inputs go there too: a residual connection adds them up."""
    kind = "int8" if places == "after the second" else "nf4"
    whole = load(llama, kind, {"": device})
    folder = llama if places != "checkpoint" else tmp_path / "whole"
    if places == "checkpoint":
        whole.save_pretrained(folder)
    how = kind if folder == llama else "plain"
    model = load(folder, how, {"": 0, **DIVIDED[places]}, offload_folder=tmp_path / "off")
    for _ in range(2):
        assert torch.equal(logits(model, device), logits(whole, device))
    if places == "on the second":
        at = model.model.layers[1].mlp.up_proj.weight.quant_state.absmax.device
        assert at == torch.device(other), "on the device where it computes"
    expected = train(add_lora(whole), device)
    assert_same_training(train(add_lora(model), device), expected)
