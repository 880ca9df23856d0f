"""Layers whose name ends in "weight" are loaded with their quantization state."""

from __future__ import annotations

import pytest
import torch

import patches

bnb = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip(
    "transformers", minversion="5.10", reason="the loader came with 5, this defect later"
)

from . import asking  # noqa: E402

ID = "transformers-weight-in-module-name"


class Config(transformers.PretrainedConfig):
    model_type = "weights"


class Model(transformers.PreTrainedModel):
    """Names that begin and end with what the loader looks for."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for name in ("gate_weight", "weight_gate", "gate", "out"):
            setattr(self, name, torch.nn.Linear(64, 64))
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.gate(self.weight_gate(self.gate_weight(x))))


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("how", asking.HOW)
def test_each_layer_is_what_was_saved(tmp_path, how, double):
    torch.manual_seed(0)
    Model(Config()).save_pretrained(tmp_path / "plain")
    asked = transformers.BitsAndBytesConfig(**asking.HOW[how], bnb_4bit_use_double_quant=double)
    model = Model.from_pretrained(tmp_path / "plain", quantization_config=asked, device_map="cpu")
    model.save_pretrained(tmp_path / "packed")
    with patches.applied(ID):
        again = Model.from_pretrained(tmp_path / "packed", device_map="cpu")
    assert asking.quantized(again) == asking.quantized(model)
    for path in asking.quantized(model):
        mine, other = again.get_submodule(path), model.get_submodule(path)
        assert torch.equal(mine.weight.data, other.weight.data)
        if how == "nf4":
            dequantized = [bnb.functional.dequantize_4bit(m.weight.data, m.weight.quant_state) for m in (mine, other)]
            assert torch.equal(*dequantized)
        else:
            assert mine.weight.SCB is not None
    if how == "nf4":
        x = torch.randn(2, 64)
        assert torch.equal(again(x), model(x))
