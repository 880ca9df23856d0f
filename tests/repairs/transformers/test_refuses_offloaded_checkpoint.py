"""The refusal of a quantized checkpoint with layers on disk names a remedy, and the remedy works."""

from __future__ import annotations

import accelerate
import pytest
import torch

import patches
from tests.repairs.peft.offloading import device_map, logits, quantization, save_base, whole

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

PATCH = "transformers-refuses-offloaded-checkpoint"


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_remedy(kind, flag, tmp_path):
    base = save_base(tmp_path / "base")
    whole(base, kind).save_pretrained(tmp_path / "quantized")
    load = transformers.AutoModelForCausalLM.from_pretrained
    options = quantization(kind, llm_int8_enable_fp32_cpu_offload=flag)
    with patches.applied(PATCH), pytest.raises(ValueError, match="dispatch_model") as refusal:
        load(tmp_path / "quantized", device_map=device_map("cpu"), **options)
    with patches.applied():
        assert "force_hooks=True" in str(refusal.value)
        model = load(tmp_path / "quantized", device_map={"": "cpu"})
        expected = logits(model)
        accelerate.dispatch_model(model, device_map("cpu"), offload_dir=str(tmp_path / "off"), force_hooks=True)
        assert model.model.layers[1].mlp.up_proj.weight.is_meta
        assert torch.equal(logits(model), expected)


def test_a_model_that_is_yet_to_be_quantized_is_asked_for_the_flag(tmp_path):
    base = save_base(tmp_path / "base")
    with patches.applied(PATCH), pytest.raises(ValueError, match="you need to set `?llm_int8_enable_fp32_cpu_offload"):
        transformers.AutoModelForCausalLM.from_pretrained(base, device_map=device_map("cpu"), **quantization("int8"))
