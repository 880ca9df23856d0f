"""An adapter on a layer that is quantized by its class alone: it is that on ``nn.Linear``, and no merge writes into it."""

from __future__ import annotations

import warnings

import bitsandbytes as bnb
import peft
import pytest
import torch

import patches
from patches.engine.gate import satisfied
from patches.adapters import merge_snapshot
from patches.repairs.peft import tied_quantized_head

IDS = torch.arange(4)


class Model(torch.nn.Module):
    def __init__(self, bits: int, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(64, 64)
        if bits == 8:
            self.head = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
        elif bits == 4:
            self.head = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32)
        else:
            self.head = torch.nn.Linear(64, 64, bias=False)
        torch.manual_seed(1)
        self.head.weight = self.embedding.weight if tied else torch.nn.Parameter(torch.randn(64, 64))
        self.is_loaded_in_8bit, self.is_loaded_in_4bit = bits == 8, bits == 4

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


CONFIGS = {
    "lora": ("LoraConfig", {"r": 4, "init_lora_weights": False}),
    "dora": ("LoraConfig", {"r": 4, "init_lora_weights": False, "use_dora": True}),
    "ia3": ("IA3Config", {"feedforward_modules": [], "init_ia3_weights": False}),
    "adalora": ("AdaLoraConfig", {"total_step": 10, "init_lora_weights": False}),
    "randlora": ("RandLoraConfig", {"r": 8, "init_weights": False}),
    "pvera": ("PveraConfig", {"r": 8, "init_weights": False, "sample_at_inference": False}),
    "road": ("RoadConfig", {"init_weights": False}),
    "hira": ("HiraConfig", {"r": 8, "init_weights": False}),
    "vera": ("VeraConfig", {"r": 8, "init_weights": False}),
    "oft": ("OFTConfig", {"oft_block_size": 8, "init_weights": False}),
}


IDS_OF_PATCHES = (
    "peft-tied-quantized-head", "bitsandbytes-linear4bit-plain-weight", "bitsandbytes-int8-plain-weight",
)  # fmt: skip
if not satisfied("bitsandbytes>=0.50"):
    IDS_OF_PATCHES += ("bitsandbytes-int8-tied-state-dict",)  # the state dict of a tied INT8 head is an error there


@pytest.fixture(autouse=True)
def applied():
    with patches.applied(*IDS_OF_PATCHES), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft: the head is tied
        yield


def adapted(name: str, bits: int, tied: bool = True) -> peft.PeftModel:
    config, options = CONFIGS[name]
    if not hasattr(peft, config):
        pytest.skip(f"peft {peft.__version__} has no {config}")
    base = Model(bits, tied)
    torch.manual_seed(2)
    return peft.get_peft_model(base, getattr(peft, config)(target_modules=["head"], **options)).eval()


def results(model: peft.PeftModel) -> list[torch.Tensor]:
    """The logits, and the gradients of the adapter."""
    logits = model(IDS)
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_adapter_on_the_floating_point_layer_and_is_not_merged(name, bits):
    model = adapted(name, bits)
    found, expected = results(model), results(adapted(name, 16))
    assert len(found) == len(expected) > 1
    assert all(map(torch.equal, found, expected))
    is_refused(model)


@pytest.mark.parametrize("bits", [4, 8])
def test_without_the_check_a_merge_writes_into_the_embedding(bits, monkeypatch):
    """A9 of the matrix: what the error of ``is_refused`` is for."""
    monkeypatch.setattr(tied_quantized_head._to_merge, "__code__", (lambda layer, names: names).__code__)
    monkeypatch.setattr(merge_snapshot.refuse_if_never_quantized, "__code__", (lambda layer: layer).__code__)
    model = adapted("lora", bits)
    before = model.get_base_model().embedding.weight.clone()
    model.merge_adapter()
    assert not torch.equal(model.get_base_model().embedding.weight, before)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_merge_into_a_layer_that_is_left_out_of_the_quantization_is_refused(bits):
    is_refused(adapted("lora", bits, tied=False))


@pytest.mark.parametrize("tied", [False, True])
def test_a_layer_that_keeps_its_weight_in_floating_point_is_merged_unless_it_is_tied(tied):
    """peft takes it for an ``nn.Linear``."""
    base = Model(16, tied)
    weight, base.head = base.head.weight, bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=True)
    base.head.weight = weight
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["head"], init_lora_weights=False)).eval()
    if tied:
        is_refused(model)
        return
    expected = weight.detach() + model.base_model.model.head.get_delta_weight("default")
    assert torch.allclose(model.merge_and_unload().head.weight, expected)


def is_refused(model: peft.PeftModel) -> None:
    """Merging raises an error that names the layer, and changes nothing."""
    expected = model(IDS)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"'base_model\.model\.head\.base_layer' .* not quantized.*skip_modules"):
        model.merge_adapter()
    assert not model.base_model.model.head.merged
    assert torch.equal(model(IDS), expected)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_second_adapter_and_one_that_is_not_on_the_head():
    model = adapted("lora", 4)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["head"], init_lora_weights=False))
    model.set_adapter("second")
    assert not torch.equal(model(IDS), model.get_base_model().embedding(IDS))
    head = model.base_model.model.head
    head.merge(adapter_names=["elsewhere"])  # as peft merges an adapter that is on other layers alone
    with pytest.raises(ValueError, match="not quantized"):
        head.merge(adapter_names=["second"])


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_that_are_quantized_get_the_layer_of_peft_for_them(bits):
    base = Model(bits, tied=False)
    dense = base.head.weight.data
    base.head.weight = (
        bnb.nn.Params4bit(dense, requires_grad=False, quant_type="nf4")
        if bits == 4
        else bnb.nn.Int8Params(dense, requires_grad=False)
    )
    model = peft.get_peft_model(base.to("cpu"), peft.LoraConfig(target_modules=["head"]))
    assert type(model.base_model.model.head).__module__ == "peft.tuners.lora.bnb"
