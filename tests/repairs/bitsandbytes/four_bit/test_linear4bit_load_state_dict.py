"""``Linear4bit`` loads what it saved, whole or not at all."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import patches
from patches.engine.gate import satisfied

bnb = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.one_in(2)

ID = "bitsandbytes-linear4bit-load-state-dict"
NEWER = satisfied("bitsandbytes>=0.47")  # 0.46.1 has uint8 storage alone on a CPU
STORAGES = (torch.uint8, torch.bfloat16, torch.float32) if NEWER else (torch.uint8,)


def layer(seed=0, *, nested=True, bias=True, storage=torch.uint8, quantized=True, device="cpu", scale=1.0, rows=96):
    torch.manual_seed(seed)
    made = bnb.nn.Linear4bit(
        64,
        rows,
        bias=bias,
        compute_dtype=torch.float32,
        compress_statistics=nested,
        quant_type="nf4",
        quant_storage=storage,
    )
    made.weight.data = scale * torch.randn(rows, 64)
    return made.to(device) if quantized else made


def output(made, device="cpu"):
    torch.manual_seed(7)
    return made(torch.randn(3, 64).to(device))


def snapshot(made):
    """Everything that loading might touch, by identity and by value."""
    weight = made.weight
    names = [k for k in weight.__dict__ if k not in ("quant_state", "module")]
    state = weight.quant_state
    return (
        [id(weight), id(state), id(made.quant_state), *(weight.__dict__[k] for k in names)],
        [weight.data.clone(), made.bias.data.clone(), *([] if state is None else [state.absmax.clone()])],
    )


def assert_as_it_was(made, before):
    identities, tensors = snapshot(made)
    assert identities == before[0]
    assert all(map(torch.equal, tensors, before[1]))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("fresh", [True, False], ids=["onto fresh", "onto quantized"])
def test_roundtrip(nested, storage, strict, fresh, device):
    saved = layer(0, nested=nested, storage=storage, device=device, scale=3.0)
    live = layer(1, nested=not nested, storage=storage, quantized=not fresh, device=device)
    parameter = live.weight
    expected = {name: tensor.clone() for name, tensor in saved.state_dict().items()}
    with patches.applied(ID):
        result = live.load_state_dict(saved.state_dict(), strict=strict)
        assert not result.missing_keys and not result.unexpected_keys
        live.to(device)
    assert live.weight is parameter and type(parameter) is bnb.nn.Params4bit
    assert live.weight.quant_state == saved.weight.quant_state and live.quant_state is live.weight.quant_state
    for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized"):
        assert getattr(live.weight, name) == getattr(saved.weight, name), name
    assert torch.equal(output(live, device), output(saved, device))
    again = live.state_dict()
    assert list(again) == list(expected) and all(torch.equal(again[name], expected[name]) for name in again)


def test_through_files(tmp_path):
    from safetensors.torch import load_file, save_file

    saved = layer(0, scale=3.0)
    save_file(saved.state_dict(), tmp_path / "layer.safetensors")
    buffer = io.BytesIO()
    torch.save(saved.state_dict(), buffer)
    buffer.seek(0)
    with patches.applied(ID):
        for tensors in (load_file(tmp_path / "layer.safetensors"), torch.load(buffer)):
            live = layer(1)
            live.load_state_dict(tensors)
            assert torch.equal(output(live), output(saved))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_statistics_that_were_cast_are_float32_again(nested, dtype):
    """A file made smaller: as far off as the cast rounds, and exact where it does not."""
    saved = layer(0, nested=nested)
    cast = {k: t.to(dtype) if t.dtype == torch.float32 and k != "bias" else t for k, t in saved.state_dict().items()}
    for assign in (False, True):
        live = layer(1, nested=nested)
        with patches.applied(ID):
            live.load_state_dict(cast, assign=assign)
        state = live.weight.quant_state
        assert state.code.dtype == (state.state2 if nested else state).absmax.dtype == torch.float32
        off = (output(live) - output(saved)).norm() / output(saved).norm()
        assert off < 1e-2 and (dtype != torch.float64 or off == 0)


def test_what_was_loaded_shares_no_memory_unless_assigned():
    tensors = layer(0).state_dict()
    with patches.applied(ID):
        live, assigned = layer(1), layer(1)
        live.load_state_dict(tensors)
        assigned.load_state_dict(tensors, assign=True)
    assert assigned.weight.data_ptr() == tensors["weight"].data_ptr()
    assert assigned.weight.quant_state.absmax is not live.weight.quant_state.absmax
    assert assigned.weight.quant_state.absmax.data_ptr() == tensors["weight.absmax"].data_ptr()
    before = output(live)
    for tensor in tensors.values():
        tensor.zero_()
    assert torch.equal(output(live), before)


def test_from_meta_only_by_assigning():
    saved = layer(0)
    with torch.device("meta"):
        live = layer(1, quantized=False)
    with patches.applied(ID):
        with pytest.raises(RuntimeError, match="assign=True"):
            live.load_state_dict(saved.state_dict())
        live.load_state_dict(saved.state_dict(), assign=True)
    assert torch.equal(output(live), output(saved))


GROUP = ["weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"]
PACKED = "weight.quant_state.bitsandbytes__nf4"


INCOMPLETE = pytest.mark.parametrize("strict, quantized", [(True, True), (True, False), (False, False)])


@INCOMPLETE
@pytest.mark.parametrize("lost", ["weight", PACKED, *GROUP])
def test_a_missing_key_is_named_and_nothing_is_loaded(lost, strict, quantized):
    tensors = layer(0).state_dict()
    del tensors[lost]
    live = layer(1, quantized=quantized)
    before = snapshot(live)
    with patches.applied(ID), pytest.raises(RuntimeError, match=f"lacks '{lost}'"):
        live.load_state_dict(tensors, strict=strict)
    assert_as_it_was(live, before)


@INCOMPLETE
def test_codes_alone_are_refused(strict, quantized):
    tensors = layer(0).state_dict()
    live = layer(1, quantized=quantized)
    before = snapshot(live)
    alone = {name: tensors[name] for name in ("weight", "bias")}
    with patches.applied(ID), pytest.raises(RuntimeError, match="lacks 'weight.absmax', 'weight.quant_map'"):
        live.load_state_dict(alone, strict=strict)
    assert_as_it_was(live, before)


def _unknown(tensors):
    tensors["weight.SCB"] = torch.ones(1)


def _garbled(tensors):
    tensors[PACKED] = torch.arange(9, dtype=torch.uint8)


def _short(tensors):
    tensors["weight.absmax"] = tensors["weight.absmax"][:-1]


def _other_shape(tensors):
    tensors.update(layer(0, rows=32).state_dict())


def _float(tensors):
    tensors.update(weight=torch.randn(96, 64))
    for name in (PACKED, *GROUP):
        del tensors[name]


def _codes_as_numbers(tensors):
    tensors["weight.absmax"] = tensors["weight.absmax"].half()


def _numbers_as_codes(tensors):
    tensors["weight.quant_map"] = tensors["weight.quant_map"].to(torch.int8)


def _bias(tensors):
    tensors["bias"] = torch.ones(5)


WRONG = {
    _unknown: "unexpected keys: 'weight.SCB'",
    _garbled: f"'{PACKED}' cannot be read",
    _short: "'weight.absmax' holds 95 values, expected 96",
    _other_shape: r"the saved weight has shape \(32, 64\), the layer \(96, 64\)",
    _float: "the weight in the state dict is not",
    _codes_as_numbers: "'weight.absmax' has dtype torch.float16",
    _numbers_as_codes: "'weight.quant_map' has dtype torch.int8",
    _bias: "size mismatch for bias",
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("spoil, message", WRONG.items(), ids=[f.__name__ for f in WRONG])
def test_a_wrong_group_is_refused(spoil, message, strict):
    tensors = layer(0).state_dict()
    spoil(tensors)
    live = layer(1)
    before = snapshot(live)
    with patches.applied(ID), pytest.raises(RuntimeError, match=message):
        live.load_state_dict(tensors, strict=strict)
    assert_as_it_was(live, before)


def test_a_missing_bias_is_torchs_own_error_and_the_weight_stays():
    tensors = layer(0).state_dict()
    del tensors["bias"]
    live = layer(1)
    before = snapshot(live)
    with patches.applied(ID):
        with pytest.raises(RuntimeError, match='Missing key.*"bias"'):
            live.load_state_dict(tensors)
        assert_as_it_was(live, before)
        assert live.load_state_dict(tensors, strict=False).missing_keys == ["bias"]


def test_other_ways_of_loading_are_as_before():
    """Floating point weights for a layer that is not quantized yet; a state dict without the weight."""
    plain = torch.nn.Linear(64, 96).state_dict()
    results = []
    for ids in ((), (ID,)):
        live = layer(1, quantized=False)
        with patches.applied(*ids) if ids else torch.no_grad():
            live.load_state_dict(plain)
            live.to("cpu")
            outcome = live.load_state_dict({"bias": torch.ones(96), "lora_A.weight": torch.ones(1)}, strict=False)
        results.append((live.state_dict(), outcome))
    (before, was), (after, now) = results
    assert was == now and now.missing_keys == ["weight"] and now.unexpected_keys == ["lora_A.weight"]
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_with_tied_layers_and_distributed_checkpoint():
    def model(seed):
        made = torch.nn.Sequential(layer(seed, rows=64), layer(seed + 10, rows=64), layer(seed + 20, rows=64))
        made[2].weight = made[0].weight
        return made

    saved, live, distributed = model(0), model(1), model(2)
    with patches.applied(ID, "bitsandbytes-params4bit-attributes"):
        live.load_state_dict(saved.state_dict())
        assert live[2].weight is live[0].weight
        assert torch.equal(output(live), output(saved))
        set_model_state_dict(distributed, copy.deepcopy(get_model_state_dict(saved)))
        assert torch.equal(output(distributed), output(saved))


def test_transformers_loads_the_same_with_and_without(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)

    def load(folder, **kwargs):
        return transformers.LlamaForCausalLM.from_pretrained(folder, device_map="cpu", **kwargs).eval()

    load(tmp_path / "plain", quantization_config=how).save_pretrained(tmp_path / "quantized")
    tokens = torch.arange(8)[None]
    for folder, kwargs in (("plain", {"quantization_config": how}), ("quantized", {})):
        before = load(tmp_path / folder, **kwargs)
        with patches.applied(ID):
            after = load(tmp_path / folder, **kwargs)
            again = load(tmp_path / "plain", quantization_config=how)
            again.load_state_dict(before.state_dict())
        for one, two in itertools.combinations((before, after, again), 2):
            assert torch.equal(one(tokens).logits, two(tokens).logits)
