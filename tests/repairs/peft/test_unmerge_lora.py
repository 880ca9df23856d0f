"""What a program wrote before a merge is put back, and what it wrote after one counts."""

from __future__ import annotations

import copy

import pytest
import torch

import patches
from patches.engine.gate import satisfied

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

from tests.repairs.peft.merging import adapted, bits, layers, same  # noqa: E402

if satisfied("peft<0.15") and not torch.cuda.is_available():
    pytest.skip("peft 0.14 dequantizes on CUDA only, to merge", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore:Merge|Unmerge:UserWarning")


@pytest.fixture(autouse=True)
def applied():
    patches.apply("peft-unmerge", "peft-dora-replaces-weight")


@torch.no_grad()
def test_scales_that_were_replaced_before_the_first_forward_are_put_back(device):
    """DoRA reads the weight when it is added, and gives the state its scales: a program finds and replaces them there."""
    model = adapted("int8", "dora", device)
    bases = [layer.get_base_layer() for layer in layers(model)]
    for base in bases:
        base.state.SCB = base.state.SCB * 2
    doubled = [base.state.SCB for base in bases]
    model.merge_adapter()
    model.unmerge_adapter()
    assert all(torch.equal(base.weight.SCB, scale) for base, scale in zip(bases, doubled))


@torch.no_grad()
def test_a_block_size_that_was_set_after_the_merge_makes_another_weight(device):
    model = adapted("nf4", "lora", device)
    own = bits(model)
    model.merge_adapter()
    for layer in layers(model):
        layer.get_base_layer().weight.quant_state.blocksize *= 2
    if device == "cpu" and satisfied("bitsandbytes<0.49"):  # its kernel sees that there are too many scales
        with pytest.raises(RuntimeError, match="size of tensor"):
            model.unmerge_adapter()
        return
    model.unmerge_adapter()
    assert not same(bits(model), own), "what was before the merge is no answer"


@torch.no_grad()
def test_a_weight_made_in_inference_mode_that_got_other_data_is_merged_and_put_back(device):
    """torch refuses a view of such a weight outside of the mode."""
    model = adapted("nf4", "lora", device)
    storage = torch.bfloat16 if satisfied("bitsandbytes>=0.47") else torch.uint8  # no other on a CPU
    for layer in layers(model):
        base = layer.get_base_layer()
        with torch.inference_mode():
            base.weight = copy.deepcopy(base.weight)
        base.weight.data = base.weight.data.view(-1).view(storage).view(-1, 1)
    own = [layer.get_base_layer().weight.data.view(torch.uint8).clone() for layer in layers(model)]  # bfloat16 has NaN
    model.merge_adapter()
    model.unmerge_adapter()
    assert all(
        torch.equal(layer.get_base_layer().weight.data.view(torch.uint8), was) for layer, was in zip(layers(model), own)
    )
