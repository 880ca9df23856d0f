"""Casting a layer, a model or a PeftModel leaves the packed bits of its 4-bit weights alone."""

from __future__ import annotations

import pytest
import torch

import patches
from patches.engine.gate import satisfied
from patches.repairs.bitsandbytes.four_bit.params4bit_cast import damage

bnb = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.one_in(3)

ID = "bitsandbytes-params4bit-cast"
STORAGES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.float16),
    "to dtype": lambda m: m.to(torch.float16),
    "to device and dtype": lambda m: m.to("cpu", torch.float16),
    "to like": lambda m: m.to(torch.zeros(1, dtype=torch.float16)),
}
computes = pytest.mark.skipif(
    not satisfied("bitsandbytes>=0.47"), reason="0.46.1 computes with uint8 storage alone on a CPU"
)


def layer(storage, quantized=True):
    torch.manual_seed(0)
    made = bnb.nn.Linear4bit(64, 96, compute_dtype=torch.float32, quant_type="nf4", quant_storage=storage)
    return made.to("cpu") if quantized else made


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["model", "layer"])
def test_bits_and_state_stay(storage, cast, inside):
    made = layer(storage)
    model = torch.nn.Sequential(made, torch.nn.LayerNorm(96)) if inside else made
    weight, state = made.weight, made.weight.quant_state
    bits, kept = weight.data.view(torch.uint8).clone(), dict(vars(state))
    with patches.applied(ID):
        cast(model)
    assert made.weight is weight and weight.quant_state is state
    assert (weight.dtype, weight.quant_storage, state.dtype) == (storage, storage, torch.float32)
    assert torch.equal(weight.data.view(torch.uint8), bits)
    assert torch.equal(state.absmax, kept["absmax"]) and torch.equal(state.code, kept["code"])
    assert made.bias.dtype is not torch.float32 or cast is CASTS["float"], "the rest of the layer is cast"


BY_HAND = {
    "to int32": lambda w: w.to(torch.int32),
    "shift": lambda w: w.to(torch.int32) << 8,
    "half": lambda w: w.half(),
    "bfloat16": lambda w: w.bfloat16(),
    "mean": lambda w: w.float().double().nan_to_num(0.0, 0.0, 0.0).mean(),
    "double": lambda w: w.double(),
    "int": lambda w: w.int(),
    "long": lambda w: w.long(),
    "type": lambda w: w.type(torch.float64),
    "type by name": lambda w: w.type("torch.FloatTensor"),
    "type_as": lambda w: w.type_as(torch.zeros(1, dtype=torch.int16)),
    "to like": lambda w: w.to(torch.zeros(1, dtype=torch.float64)),
    "to device and dtype": lambda w: w.to("cpu", torch.float64),
    "to by keywords": lambda w: w.to(device=torch.device("cpu"), dtype=torch.float64),
    "to with copy": lambda w: w.data.to(torch.float64, copy=True),
}


@pytest.mark.parametrize("cast", BY_HAND.values(), ids=BY_HAND)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_a_cast_of_the_parameter_by_hand_is_what_it_was(storage, cast):
    """With every patch: a number of each byte, by the rules of torch, in the class that it had."""
    weight = layer(storage).weight
    expected = cast(weight)
    with patches.applied(ID):
        alone = cast(weight)
    with patches.applied():
        together = cast(weight)
    for result in (alone, together):
        assert type(result) is type(expected) and result.dtype is expected.dtype
        assert (result is weight) is (expected is weight), "a cast to the dtype that it has"
        assert torch.equal(result.nan_to_num(), expected.nan_to_num())
        assert getattr(result, "quant_state", None) is getattr(expected, "quant_state", None)
    assert weight.type() == torch.Tensor.type(weight) and weight.dtype is storage


class Holder(torch.nn.Module):
    """A module of a user's own that holds 4-bit weights, and one that is not quantized."""

    def __init__(self, storage):
        super().__init__()
        self.one, self.two = layer(storage).weight, layer(storage).weight
        self.later = layer(storage, quantized=False).weight


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("make", [bnb.nn.LinearNF4, bnb.nn.EmbeddingNF4, Holder], ids=lambda cls: cls.__name__)
def test_whatever_module_holds_the_weight(make, cast):
    storage = torch.bfloat16
    made = make(storage) if make is Holder else make(64, 96, quant_storage=storage).to("cpu")
    quantized = [p for p in made.parameters() if getattr(p, "bnb_quantized", False)]
    bits = [p.data.view(torch.uint8).clone() for p in quantized]
    with patches.applied(ID):
        cast(made)
    assert quantized and all(p.dtype is storage for p in quantized)
    assert all(map(torch.equal, (p.data.view(torch.uint8) for p in quantized), bits))
    if make is Holder and cast is CASTS["half"]:
        assert made.later.dtype is torch.float16, "it is not quantized yet, so it is cast"


def test_a_weight_that_came_out_of_a_pickle_as_a_plain_parameter():
    made = layer(torch.bfloat16)
    plain = torch.nn.Parameter(made.weight.data.clone(), requires_grad=False)
    vars(plain).update(vars(made.weight))  # what torch makes of it
    made.weight = plain
    with patches.applied(ID):
        made.half()
    expected = layer(torch.bfloat16).weight.data
    assert made.weight is plain and torch.equal(plain.view(torch.uint8), expected.view(torch.uint8))


def test_a_move_with_a_cast_in_it_takes_the_weight_and_its_statistics_along():
    made = layer(torch.bfloat16)
    state, bits = made.weight.quant_state, made.weight.data.view(torch.uint8).clone()
    with patches.applied(ID, "bitsandbytes-linear4bit-meta-moves", "bitsandbytes-params4bit-meta"):
        made.to("meta", torch.float16)
        assert made.weight.is_meta and made.weight.dtype is torch.bfloat16 and made.weight.quant_state is state
        assert made.bias.dtype is torch.float16 and made.weight.shape == (bits.numel() // 2, 1)


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_weight_that_is_not_quantized_yet_is_cast_as_before(cast):
    results = []
    for ids in ((), (ID,)):
        made = layer(torch.uint8, quantized="device" in str(cast))
        with patches.applied(*ids) if ids else torch.no_grad():
            cast(made)
        results.append(made)
    before, after = results
    assert after.weight.dtype is before.weight.dtype and torch.equal(after.weight, before.weight)


@computes
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_outputs_are_those_of_a_layer_that_was_not_cast(storage):
    made, x = layer(storage), torch.randn(3, 64)
    made.bias.data = made.bias.data.half().float()
    expected = made(x)
    with patches.applied(ID):
        assert torch.equal(made.half()(x), expected)
        assert torch.equal(made.float()(x), expected)


@computes
def test_peft_model_from_disk(tmp_path):
    """FSDP-QLoRA's storage; the model of which transformers guards the casts, behind a PeftModel, which does not."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    tokens = torch.arange(16)[None]

    def logits_after(cast):
        torch.manual_seed(1)
        base = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path, quantization_config=how, device_map="cpu", dtype=torch.float32
        )
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(base, lora).eval()
        with torch.no_grad():
            return cast(model)(tokens).logits.double()

    expected = logits_after(lambda model: model)
    error = lambda logits: ((logits - expected).norm() / expected.norm()).item()  # noqa: E731
    assert error(logits_after(lambda model: model.half())) > 0.1, "the test does not reach the defect"
    with patches.applied(ID):
        assert error(logits_after(lambda model: model.half())) < 0.01
        assert error(logits_after(lambda model: model.to(torch.float16))) < 0.01
        assert error(logits_after(lambda model: model.float())) == 0


def test_weights_cast_before_are_named():
    """Those of layers: what a user made of one by hand has lost nothing."""
    sound, lost = layer(torch.bfloat16), layer(torch.bfloat16).half()
    by_hand = sound.weight.to(torch.int32)
    assert type(by_hand) is bnb.nn.Params4bit
    assert damage() == (
        "a 4-bit weight of shape (96, 64) was packed as torch.bfloat16 and cast to torch.float16, "
        "which destroyed its values: load the model again",
    )
    del lost
    assert damage() == () and sound.weight.bnb_quantized
