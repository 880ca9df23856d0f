"""``dequantize`` of an offloaded model: the outputs of the whole model dequantized, and it is offloaded still."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import patches
from patches.engine.gate import satisfied
from tests.repairs.peft.offloading import IDS, assert_same, logits, lora, offloaded, save_base, step, whole

pytest.importorskip("bitsandbytes")
accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.one_in(2)
PATCH = "transformers-dequantize-offloaded"
FLOWS = [
    ("int8", "dispatch_model"), ("int8", "layer by layer"), ("nf4", "disk_offload"), ("nf4", "cpu_offload"),
    ("nf4", "layer by layer"),
]  # fmt: skip


def linear(model: torch.nn.Module) -> set[str]:
    return {type(m).__name__ for m in model.modules() if "inear" in type(m).__name__}


def away(model: torch.nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.is_meta}


@pytest.mark.parametrize("kind, way", FLOWS)
def test_equal_to_the_whole_model(kind, way, base, device):
    with patches.applied():
        expected = whole(base, kind, device).dequantize()
        model = offloaded(base, kind, way, device)
        if way == "dispatch_model":
            logits(model)
        before = away(model)
        assert before and model.dequantize() is model
        assert linear(model) == {"Linear"} and away(model) == before
        wanted = logits(expected)
        assert torch.equal(logits(model), wanted) and torch.equal(logits(model), wanted)
        of = [{n: (p.dtype, p.shape, p.requires_grad) for n, p in m.named_parameters()} for m in (model, expected)]
        assert of[0] == of[1]


@pytest.mark.parametrize("kind, way", [("int8", "disk_offload"), ("nf4", "dispatch_model")])
def test_merged_dequantized_saved_and_trained(kind, way, base, tmp_path, device):
    from transformers import AutoModelForCausalLM

    def plain(model: Any) -> Any:
        return lora(model).merge_and_unload().dequantize()

    with patches.applied():
        model, expected = plain(offloaded(base, kind, way, device)), plain(whole(base, kind, device))
        model.save_pretrained(tmp_path / "plain")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", device_map={"": device}, dtype="auto")
        assert torch.equal(logits(loaded), logits(expected))
        assert_same(step(lora(model)), step(lora(expected)))


@pytest.mark.skipif(satisfied("transformers<5"), reason="transformers 4 takes no dtype")
def test_the_dtype_that_is_asked_for(base, device):
    dtype = torch.bfloat16
    with patches.applied():
        model = offloaded(base, "nf4", "dispatch_model", device).dequantize(dtype)
        expected = whole(base, "nf4", device).dequantize(dtype)
        got, wanted = ({n: p.dtype for n, p in m.named_parameters()} for m in (model, expected))
        assert got == wanted and dtype in got.values()
        x = torch.randn(2, 64, device=device, dtype=dtype)
        layers = [m.model.layers[1].mlp.up_proj for m in (model, expected)]
        assert torch.equal(layers[0](x), layers[1](x))


def test_the_hooks_can_be_taken_away(base):
    """The weights go where they were before the model was offloaded."""
    with patches.applied():
        expected = whole(base, "nf4").dequantize()
        model = offloaded(base, "nf4", "dispatch_model").dequantize()
        accelerate.hooks.remove_hook_from_submodules(model)
        assert not away(model)
        assert torch.equal(model(input_ids=IDS).logits, expected(input_ids=IDS).logits)


def test_biases_stay(tmp_path, device):
    base = save_base(tmp_path / "base", attention_bias=True)
    model = whole(base, "plain")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.bias)
    model.save_pretrained(base)
    with patches.applied():
        model, expected = offloaded(base, "nf4", "cpu_offload", device), whole(base, "nf4", device)
        assert expected.model.layers[0].self_attn.q_proj.bias.any()
        assert torch.equal(logits(model.dequantize()), logits(expected.dequantize()))


def test_preloaded_submodules_are_refused_and_nothing_is_changed(base, device):
    with patches.applied():
        model = whole(base, "nf4", device)
        accelerate.cpu_offload(model, torch.device(device), preload_module_classes=["LlamaMLP"])
        with pytest.raises(ValueError, match="without preload_module_classes, or dequantize it before it is offloaded"):
            model.dequantize()
        assert sum(type(m).__name__ == "Linear4bit" for m in model.modules()) == 14


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_whole_model_is_dequantized_as_before(kind, base, device):
    expected = whole(base, kind, device).dequantize().state_dict()
    with patches.applied(PATCH):
        assert_same(whole(base, kind, device).dequantize().state_dict(), expected)
