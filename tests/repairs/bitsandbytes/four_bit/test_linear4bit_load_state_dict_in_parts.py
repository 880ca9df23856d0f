"""Quantized layers that a program loads from the files of a checkpoint, one by one with strict=False."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file

import patches
from tests.repairs.bitsandbytes.four_bit.test_linear4bit_load_state_dict import layer, output

ID = "bitsandbytes-linear4bit-load-state-dict"


@pytest.mark.parametrize("ran", [False, True], ids=["cold", "ran"])
@pytest.mark.parametrize("order", [1, -1], ids=["", "reversed"])
@pytest.mark.parametrize("last", ["weight", "weight.absmax", "weight.nested_absmax", "weight.quant_map"])
def test_the_files_of_a_checkpoint_are_loaded_one_by_one(last, order, ran):
    """The first ends with ``last``, in the order of the state dict."""
    saved = layer(0)
    tensors = {key: tensor.clone() for key, tensor in saved.state_dict().items()}
    cut = list(tensors).index(last) + 1
    files = [dict([*tensors.items()][:cut]), dict([*tensors.items()][cut:])][::order]
    with patches.applied(ID):
        live = layer(1)
        if ran:
            output(live)
        live.load_state_dict(files[0], strict=False)
        with pytest.raises(RuntimeError, match=r"Linear4bit .* was loaded in parts.*lacks '.*Load the file"):
            output(live)
        assert not live.load_state_dict(files[1], strict=False).unexpected_keys
        assert torch.equal(output(live), output(saved))
        assert live.state_dict().keys() == tensors.keys()
        live.load_state_dict(layer(2).state_dict())
        assert torch.equal(output(live), output(layer(2))), "what came in parts is forgotten"


def test_a_part_that_is_what_the_layer_has_counts_when_the_rest_is_not():
    """The quantization map is the same for each layer."""
    saved = layer(0)
    tensors = {key: tensor.clone() for key, tensor in saved.state_dict().items()}
    with patches.applied(ID):
        live = layer(1)
        expected = output(layer(1))
        live.load_state_dict({"weight.quant_map": tensors.pop("weight.quant_map")}, strict=False)
        assert torch.equal(output(live), expected)
        live.load_state_dict({"weight": tensors.pop("weight")}, strict=False)
        live.load_state_dict(tensors, strict=False)
        assert torch.equal(output(live), output(saved))


def test_another_quantization_state_ends_what_was_loaded_in_parts():
    with patches.applied(ID):
        live, other = layer(1), layer(2)
        live.load_state_dict({"weight": layer(0).state_dict()["weight"]}, strict=False)
        live.weight = copy.deepcopy(other.weight)
        live.quant_state = live.weight.quant_state
        live.load_state_dict({"bias": other.bias.detach()}, strict=False)
        assert torch.equal(output(live), output(other))
        rest = {k: v for k, v in layer(0).state_dict().items() if k not in ("weight", "bias")}
        live.load_state_dict(rest, strict=False)
        with pytest.raises(RuntimeError, match="lacks 'weight'"):
            output(live)


def test_a_bias_that_is_missing_keeps_no_weight_from_being_loaded():
    saved, live = layer(0), layer(1)
    tensors = saved.state_dict()
    del tensors["bias"]
    live.bias.data.copy_(saved.bias)
    with patches.applied(ID):
        assert live.load_state_dict(tensors, strict=False).missing_keys == ["bias"]
        assert torch.equal(output(live), output(saved))


@pytest.mark.parametrize("bits", [4, 8])
def test_transformers_loads_a_checkpoint_of_several_files(bits, tmp_path):
    """``load_sharded_checkpoint``, with which its Trainer resumes: one file after the other, not strictly."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers.trainer_utils import load_sharded_checkpoint

    options = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 32}
    config = transformers.LlamaConfig(**options, num_attention_heads=2, num_key_value_heads=2)
    how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} if bits == 4 else {"load_in_8bit": True}
    quantization, ids = transformers.BitsAndBytesConfig(**how), torch.arange(10)[None]
    with patches.applied(), torch.no_grad():
        saved, live = (quantized(config, seed, quantization, tmp_path / str(seed)) for seed in (0, 1))
        assert not torch.equal(live(ids).logits, saved(ids).logits)
        saved.save_pretrained(tmp_path / "files", max_shard_size="7KB")
        whole = [
            {key.partition(".weight")[0].removesuffix(".SCB") for key in load_file(file)}
            for file in (tmp_path / "files").glob("*.safetensors")
        ]
        assert sum(map(len, whole)) > len(set().union(*whole)), "a layer is divided between two files"
        load_sharded_checkpoint(live, str(tmp_path / "files"), strict=False)
        assert torch.equal(live(ids).logits, saved(ids).logits)


def quantized(config, seed, quantization, folder):
    import transformers

    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    load = transformers.LlamaForCausalLM.from_pretrained
    return load(folder, quantization_config=quantization, device_map={"": "cpu"}).eval()
