"""A weight that was dequantized in place is quantized again only where a layer of bitsandbytes has it."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import int8_vectorwise_dequant
from bitsandbytes.nn import Int8Params, Linear8bitLt

import patches
from patches.process import live_objects

ID = "accelerate-dequantized-in-place"
NOTES = "bitsandbytes-int8-plain-weight"  # which knows the layer of a weight that has not
HOMES = "bitsandbytes-int8-scales-lost-on-offload"  # which knows the layer of a weight that has run
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
RAN = pytest.mark.parametrize("ran", [False, True], ids=["cold", "ran"])


def quantized(ran: bool) -> tuple[Linear8bitLt, torch.Tensor]:
    torch.manual_seed(0)
    layer = Linear8bitLt(64, 48, bias=False, has_fp16_weights=False).requires_grad_(False).to("cpu")
    weight = int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
    if ran:
        layer(X)
    return layer, weight


@RAN
@pytest.mark.parametrize("how", ["model", "weight"])
def test_a_plain_layer_keeps_its_numbers_when_it_is_moved(ran, how):
    with patches.applied(ID, HOMES):
        layer, weight = quantized(ran)
        layer.weight.data = weight.clone()
        layer.__class__ = torch.nn.Linear
        if how == "model":
            torch.nn.Sequential(layer).to("cpu")
        else:
            layer.weight = layer.weight.to("cpu")
        assert torch.equal(layer(X), torch.nn.functional.linear(X, weight))


@RAN
def test_a_linear8bit_with_new_weights_is_quantized_as_before(ran):
    with patches.applied(ID, HOMES):
        layer, _ = quantized(ran)
        layer.weight.data = new = torch.randn(48, 64)
        layer.to("cpu")
        assert layer.weight.dtype == torch.int8
        torch.testing.assert_close(int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB), new, rtol=0, atol=0.03)


def test_a_weight_of_nobody_is_quantized_as_before():
    with patches.applied(ID):
        assert Int8Params(torch.randn(4, 64), requires_grad=False).to("cpu").dtype == torch.int8


class ReadsCodes(torch.nn.Module):
    """A module of a user's, which computes with the codes of its weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = Int8Params(weight, has_fp16_weights=False, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ int8_vectorwise_dequant(self.weight.CB, self.weight.SCB).t()


def test_a_module_that_reads_codes_is_quantized_again_with_new_weights():
    def outputs() -> torch.Tensor:
        torch.manual_seed(0)
        module = ReadsCodes(torch.randn(48, 64)).to("cpu")
        module.weight.data = torch.randn(48, 64)
        return module.to("cpu")(X)

    expected = outputs()
    with patches.applied(ID):
        assert torch.equal(outputs(), expected)


def test_new_weights_for_layers_that_have_not_run_need_no_walk_over_all_objects(monkeypatch):
    with patches.applied(ID, NOTES):
        layers = torch.nn.Sequential(*(quantized(False)[0] for _ in range(3)))
        for layer in layers:
            layer.weight.data = torch.randn(48, 64)
        monkeypatch.setattr(live_objects, "find_holders", lambda *_, **__: pytest.fail("walked over all objects"))
        layers.to("cpu")
        assert {layer.weight.dtype for layer in layers} == {torch.int8}


def test_new_weights_for_modules_of_a_user_need_no_walk_over_all_objects(monkeypatch):
    modules = torch.nn.ModuleList([ReadsCodes(torch.randn(48, 64)) for _ in range(3)]).to("cpu")
    with patches.applied(ID):
        monkeypatch.setattr(live_objects, "find_holders", lambda *_, **__: pytest.fail("walked over all objects"))
        for module in modules:
            module.weight.data = torch.randn(48, 64)
        assert all(module.weight.dtype == torch.int8 for module in modules.to("cpu"))


@RAN
@pytest.mark.parametrize("how", ["model", "weight"])
def test_packed_weights_that_were_cast_are_not_quantized(ran, how):
    """Without the patch they become 800 times too large, silently."""
    with patches.applied(ID, HOMES):
        layer, _ = quantized(ran)
        layer.weight.data = layer.weight.data.half()
        cast = layer.weight.data.clone()
        with pytest.raises(RuntimeError, match="packed INT8 weights that were cast"):
            layer.to("cpu") if how == "model" else layer.weight.to("cpu")
        assert torch.equal(layer.weight.data, cast)


def test_other_whole_numbers_are_quantized_as_before():
    with patches.applied(ID, HOMES):
        layer, _ = quantized(False)
        layer.weight.data = torch.randint(-100, 100, (48, 64)).float().index_fill_(1, torch.tensor([0]), 127)
        weight = layer.weight.data.clone()
        assert torch.allclose(layer.to("cpu")(X), X @ weight.t(), rtol=0.02, atol=30)


def test_accelerate_brings_back_what_it_quantized_on_its_way_to_the_disk(tmp_path):
    """It casts the packed weights to the dtype that the weight had on meta, and bitsandbytes 0.46 keeps their codes beside."""
    accelerate = pytest.importorskip("accelerate", reason="it is the program")
    from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model
    from safetensors.torch import save_file

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    save_file(layers.state_dict(), tmp_path / "model.safetensors")
    with accelerate.init_empty_weights():
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    how = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["0"], torch_dtype=torch.float32)
    with patches.applied():
        model = load_and_quantize_model(
            model, how, str(tmp_path / "model.safetensors"), {"0": "cpu", "1": "disk"}, offload_folder=tmp_path
        )
        for _ in range(2):
            assert torch.allclose(model(X), layers(X), atol=0.05)
