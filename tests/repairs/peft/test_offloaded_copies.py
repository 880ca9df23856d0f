"""Deep copies of an offloaded model: they compute what it does, are offloaded, and are models of their own."""

from __future__ import annotations

import copy

import pytest
import torch

import patches
from tests.repairs.peft.offloading import WAYS, assert_same, logits, lora, offloaded, step, whole

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")

pytestmark = pytest.mark.one_in(2)


FLOWS = [("plain", "from_pretrained"), ("int8", "layer by layer"), *(("nf4", way) for way in WAYS)]


@pytest.mark.parametrize("kind, way", FLOWS)
def test_a_copy_computes_the_same(kind, way, base, device):
    with patches.applied():
        model, expected = offloaded(base, kind, way, device), logits(whole(base, kind, device))
        if way == "dispatch_model":
            logits(model)
        copied = copy.deepcopy(model)
        away = {name for name, p in model.named_parameters() if p.is_meta}
        assert away and away == {name for name, p in copied.named_parameters() if p.is_meta}
        assert not {id(m) for m in model.modules()} & {id(m) for m in copied.modules()}
        assert torch.equal(logits(copied), expected) and torch.equal(logits(model), expected)
        del model
        assert torch.equal(logits(copied), expected), "it needs the model that it was copied from"


@pytest.mark.parametrize("kind, way", [("int8", "dispatch_model"), ("nf4", "disk_offload"), ("nf4", "layer by layer")])
def test_a_copy_is_trained_and_merged_alone(kind, way, base, device):
    with patches.applied():
        model = offloaded(base, kind, way, device)
        before = logits(model)
        copied = lora(copy.deepcopy(model))
        assert_same(step(copied), step(lora(whole(base, kind, device))))
        merged = logits(copied.merge_and_unload())
        assert torch.equal(merged, logits(lora(whole(base, kind, device)).merge_and_unload()))
        assert not torch.equal(merged, before) and torch.equal(logits(model), before)


def test_a_model_with_adapters(base, device):
    with patches.applied():
        model = lora(offloaded(base, "nf4", "cpu_offload", device))
        copied, expected = copy.deepcopy(model), step(model)
        assert_same(step(copied), expected)
        with torch.no_grad():
            for name, parameter in copied.named_parameters():
                if "lora_" in name:
                    parameter.zero_()
        assert_same(step(model), expected)
