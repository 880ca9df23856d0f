"""Models of other shapes with layers on the CPU and the disk: ties, Conv1D, encoder-decoders, vision, converted weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from patches.loading import module_sizes
from patches.loading.device_maps import plan_device_map
from patches.process import malloc_trim
from patches.repairs.reproducers import tiny_models
from tests.repairs.patched_once import unpatched  # noqa: F401

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")
from transformers.quantizers.auto import AutoHfQuantizer  # noqa: E402

SIZE = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
IDS = torch.arange(8)[None]


def tied():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, tie_word_embeddings=True, **SIZE))


def conv1d():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=16, n_embd=64, n_layer=2, n_head=2))


def encoder_decoder():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=16, d_model=64, d_kv=32, d_ff=64, num_layers=2, num_heads=2)
    )


def one_embedding():
    """Before transformers 5, one module that has a name in the encoder and the decoder, too."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=16, d_model=64, d_kv=32, d_ff=64, num_layers=2, num_heads=2, tie_word_embeddings=False
        )
    )


def own_buffer():
    """``final_logits_bias`` is the model's own, and no module's."""
    sizes = dict(encoder_layers=2, encoder_ffn_dim=64, encoder_attention_heads=2)
    sizes |= dict(decoder_layers=2, decoder_ffn_dim=64, decoder_attention_heads=2)
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=16, d_model=64, max_position_embeddings=16, **sizes)
    )


def fused():
    """Its checkpoint has one matrix for what the model has as two, or the other way round."""
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(vocab_size=16, pad_token_id=0, **SIZE))


def experts():
    sizes = dict(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_key_value_heads=1)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(vocab_size=16, **SIZE, **sizes))


MODELS = {
    "tied": (tied, {"": "cpu", "model.layers.1": "disk"}),
    "tied on disk": (tied, {"": "cpu", "model.embed_tokens": "disk", "lm_head": "disk", "model.layers.0": "disk"}),
    "tied to what stays": (tied, {"": "cpu", "lm_head": "disk", "model.layers.0": "disk"}),
    "conv1d": (conv1d, {"": "cpu", "transformer.h.1": "disk"}),
    "encoder-decoder": (encoder_decoder, {"": "cpu", "encoder.block.1": "disk", "decoder.block.0": "disk"}),
    "one embedding": (one_embedding, {"": "disk", "encoder.block.0": "cpu"}),
    "one embedding alone": (one_embedding, {"": "disk"}),
    "own buffer": (own_buffer, {"": "cpu", "model.encoder.layers.0": "disk"}),
    "fused": (fused, {"": "cpu", "model.layers.0": "disk"}),
    "experts": (experts, {"": "cpu", "model.layers.1": "disk"}),
}
HOW = {"nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"), "int8": dict(load_in_8bit=True)}


def outputs(model):
    also = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=IDS, **also).logits


DAILY = {("tied on disk", "int8"), ("tied to what stays", "nf4"), ("conv1d", "nf4"), ("fused", "int8")}
REST = pytest.mark.release("four of the pairs of model and kind")
PAIRS = [pytest.param(name, kind, marks=[] if (name, kind) in DAILY else [REST]) for name in MODELS for kind in HOW]


@pytest.mark.parametrize("name, kind", PAIRS)
def test_the_model_that_is_loaded_whole(name, kind, tmp_path):
    make, places = MODELS[name]
    torch.manual_seed(0)
    made = make()
    made.save_pretrained(tmp_path / "plain")
    same(type(made).from_pretrained, places, HOW[kind], tmp_path)


def same(from_pretrained, places, how, tmp_path, compute=outputs):
    """Loaded whole and offloaded afterwards, loaded so, saved, and loaded so from what was saved."""
    how = transformers.BitsAndBytesConfig(**how)
    load = lambda folder, places, **also: from_pretrained(  # noqa: E731
        folder, device_map=places, offload_folder=tmp_path / "off", **tiny_models.in_dtype(torch.float32), **also
    )
    whole = load(tmp_path / "plain", {"": "cpu"}, quantization_config=how)
    whole.save_pretrained(tmp_path / "whole")
    one = load(tmp_path / "plain", places, quantization_config=how)
    two = load(tmp_path / "whole", places)
    expected = compute(one)  # after which accelerate has given each module a parameter of its own, also of tied ones
    one.save_pretrained(tmp_path / "one", max_shard_size="20KB")  # row scales in another file than their weight
    two.save_pretrained(tmp_path / "two")
    saved, *others = (
        {name: tensor for file in (tmp_path / folder).glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in ("whole", "one", "two")
    )
    for other in others:
        assert other.keys() == saved.keys()
        assert all(torch.equal(other[key], saved[key]) and other[key].dtype == saved[key].dtype for key in saved)
    assert torch.equal(compute(two), expected)
    reference = compute(whole)
    assert (expected - reference).norm() < 0.01 * reference.norm()
    return whole, one


@pytest.mark.parametrize("given, place", [
    ({"": "cpu", "0.inner": "disk"}, "disk"),
    ({"": "cuda:0", "0.scale": "cuda:0", "0.inner": "cpu"}, "cpu"),
    ({"": "cpu", "0": "cpu", "1": "disk"}, "cpu"),
])  # fmt: skip
def test_a_module_with_a_parameter_of_its_own_goes_to_the_farthest_place_that_a_part_has(given, place):
    block = torch.nn.Module()
    block.scale, block.inner = torch.nn.Parameter(torch.ones(4)), torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(block, torch.nn.Linear(4, 4))
    quantizer = AutoHfQuantizer.from_config(transformers.BitsAndBytesConfig(**HOW["nf4"]))
    assert plan_device_map(model, given, quantizer)["0"] == place


LAYERS = [module_sizes.Unit(f"layers.{i}", torch.nn.Linear(1, 1, bias=False), 10, 1, True) for i in range(6)]
LARGE, SMALL = module_sizes.Unit("embed", None, 100, 0, False), module_sizes.Unit("norm", None, 2, 0, False)


@pytest.mark.parametrize("rooms, expected", [
    ([30, 40], {0: ["norm", "layers.0", "layers.1"], 1: ["layers.2", "layers.3", "layers.4"], "disk": ["embed", "layers.5"]}),
    ([10, 30], {0: ["norm"], 1: ["layers.0", "layers.1"], "disk": ["embed", *(f"layers.{i}" for i in range(2, 6))]}),
    ([1, 40], {1: ["norm", *(f"layers.{i}" for i in range(3))], "disk": ["embed", *(f"layers.{i}" for i in range(3, 6))]}),
    ([1, 1], {"disk": ["embed", "norm", *(f"layers.{i}" for i in range(6))]}),
])  # fmt: skip
def test_what_fits_no_device_leaves_them_to_the_layers(rooms, expected):
    """What waits leaves statistics on the first device that takes something."""
    resident, waiting = (
        [module_sizes.Room(*each) for each in enumerate(rooms)],
        [module_sizes.Room("disk", float("inf"))],
    )
    found = module_sizes._place_units(
        [LARGE, *LAYERS, SMALL], {f"layers.{i}.weight": (10, 1) for i in range(6)}, resident, waiting
    )
    assert {place: sorted(n for n in found if found[n] == place) for place in set(found.values())} == {
        place: sorted(names) for place, names in expected.items()
    }


def test_a_part_that_is_too_large_leaves_the_device_to_the_parts_of_further_layers():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.experts = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)

    layers = [module_sizes.Unit(f"layers.{i}", Layer(), 110, 0, True) for i in range(4)]
    each = {
        f"layers.{i}.{name}.weight": (size, 0) for i in range(4) for name, size in (("attention", 10), ("experts", 100))
    }
    rooms = [module_sizes.Room(0, 35)], [module_sizes.Room("disk", float("inf"))]
    found = module_sizes._place_units(layers, each, *rooms)
    assert [name for name in found if found[name] == 0] == [f"layers.{i}.attention" for i in range(3)]


def test_vision_language_with_a_list_of_skipped_modules(tmp_path):
    tiny_models.save_llava(str(tmp_path / "plain"))
    how = {**HOW["nf4"], "llm_int8_skip_modules": ["multi_modal_projector", "lm_head"]}
    places = {"": "cpu", "model.vision_tower": "disk", "model.language_model.layers": "disk"}

    def compute(model):
        pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            return model(input_ids=torch.tensor([[1, 15, 15, 15, 15, 2]]), pixel_values=pixels).logits

    same(transformers.LlavaForConditionalGeneration.from_pretrained, places, how, tmp_path, compute)


def test_a_head_that_is_not_in_the_checkpoint(tmp_path):
    torch.manual_seed(0)
    tied().save_pretrained(tmp_path / "plain")
    how = transformers.BitsAndBytesConfig(**HOW["nf4"])
    load = transformers.LlamaForSequenceClassification.from_pretrained
    places = {"": "cpu", "model.layers.1": "disk", "score": "disk"}
    model = load(
        tmp_path / "plain", quantization_config=how, device_map=places, offload_folder=tmp_path / "off", pad_token_id=0
    )
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=IDS).logits).all()


@pytest.mark.parametrize("kind", [pytest.param("nf4", marks=pytest.mark.release("int8 has scales, too")), "int8"])
def test_the_checkpoint_of_a_base_model(kind, tmp_path):
    """Its names have no prefix, and those of the map have one."""
    torch.manual_seed(0)
    tied().model.save_pretrained(tmp_path / "plain")
    places = {"model": "disk", "model.layers.0": "cpu", "lm_head": "cpu"}
    same(transformers.LlamaForCausalLM.from_pretrained, places, HOW[kind], tmp_path)


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.release("nf4 is the same program"))])
def test_generation_and_a_trainer(kind, tmp_path):
    """As whole: the same tokens, the same losses with gradient checkpointing."""
    peft = pytest.importorskip("peft")
    tied().save_pretrained(tmp_path / "plain")
    found = []
    for places in ({"": "cpu"}, {"": "cpu", "model.layers.1": "disk"}):
        model = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / "plain", device_map=places, offload_folder=tmp_path / "off",
            **tiny_models.in_dtype(torch.float32),
            quantization_config=transformers.BitsAndBytesConfig(**HOW[kind]),
        )  # fmt: skip
        tokens = model.generate(IDS, max_new_tokens=8, do_sample=False).tolist()
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        options = transformers.TrainingArguments(
            str(tmp_path / "trainer"), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[],
            save_strategy="no", use_cpu=True, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
            learning_rate=1e-2,
        )  # fmt: skip
        data = [{"input_ids": IDS[0].roll(i), "labels": IDS[0].roll(i)} for i in range(8)]
        trainer = transformers.Trainer(model, options, train_dataset=data)
        trainer.train()
        found.append((tokens, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
    (whole, losses), (one, other) = found
    assert one == whole and len(losses) == 3
    assert other == pytest.approx(losses, rel=1e-3)  # AVX512-BF16 multiplies what is not offloaded by another kernel


def test_freed_memory_is_returned_where_the_cpu_quantizes(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(malloc_trim.ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=asked.append))
    monkeypatch.setattr(malloc_trim, "BYTES_TO_TRIM", 0)
    tied().save_pretrained(tmp_path / "plain")
    how = transformers.BitsAndBytesConfig(**HOW["nf4"])
    places = {"": "cpu", "model.layers.1": "disk"}
    transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=how, device_map=places, offload_folder=tmp_path / "off"
    )
    assert asked == [0] * 14, "once for each of the layers that it quantized"
    malloc_trim.trim_after_quantizing(torch.empty(8, device="meta"))
    assert len(asked) == 14, "what an accelerator quantized was never in this memory"


@pytest.mark.parametrize("names, rows", [
    (["model.embed_tokens"], 24), (["lm_head"], 8), (["model.embed_tokens", "lm_head"], None)
])  # fmt: skip
def test_resizing_an_embedding_that_waits_names_it_and_the_remedy(names, rows, tmp_path):
    """As is, also without quantization: an error about meta tensors, or about shapes in the next forward."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **SIZE)).save_pretrained(tmp_path / "plain")

    def load(places):
        how = transformers.BitsAndBytesConfig(**HOW["nf4"])
        return transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / "plain", quantization_config=how, device_map=places, offload_folder=tmp_path / "off"
        )

    model = load({"": "cpu", "model.layers.1": "disk", **dict.fromkeys(names, "disk")})
    with pytest.raises(ValueError, match="cannot change " + ".*".join(f"'{name}'" for name in names)) as caught:
        model.resize_token_embeddings(rows, pad_to_multiple_of=12 if rows is None else None)
    assert all(f"'{name}': 0" in str(caught.value) for name in names)
    model.resize_token_embeddings(16)
    assert torch.isfinite(outputs(model)).all(), "the error has changed nothing"
    model = load({"": "cpu", "model.layers.1": "disk"})
    model.resize_token_embeddings(24)
    assert outputs(model).shape[-1] == 24
