"""Models of other shapes that do not fit: an adapter on top, merged, and saved, as of the model that is loaded whole."""

from __future__ import annotations

import peft
import pytest
import torch
from safetensors.torch import load_file

from patches.engine.gate import satisfied
from patches.repairs.reproducers.tiny_models import in_dtype
from tests.device.models import quantization
from tests.repairs.transformers.test_does_not_fit_models import MODELS

pytestmark = pytest.mark.usefixtures("patched", "by_the_name_of_cuda")

IDS = torch.arange(8)[None]


def blocks(model):
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)]
    outer = [(name, part) for name, part in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    return [f"{name}.{i}" for name, part in outer for i in range(len(part))]


@torch.no_grad()
def outputs(model, device):
    also = {"decoder_input_ids": IDS.flip(1).to(device)} if model.config.is_encoder_decoder else {}
    return model(input_ids=IDS.to(device), **also).logits.cpu()


@pytest.mark.parametrize("name", ["tied", "conv1d", "encoder-decoder", "own buffer", "fused", "experts"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.release("test_loaded and test_trained of cases_loading.py, of a Llama")
def test_an_adapter_on_top(kind, name, device, tmp_path):
    torch.manual_seed(0)
    made = MODELS[name][0]().bfloat16()
    made.save_pretrained(tmp_path / "plain")
    away = {block: ("cpu", "disk")[i % 2] for i, block in enumerate(blocks(made))}
    eager = {"experts_implementation": "eager"} if name == "experts" and satisfied("transformers>=5") else {}

    def load(places):
        how = {"quantization_config": quantization(kind), "attn_implementation": "eager", **in_dtype(torch.bfloat16)}
        return (
            type(made)
            .from_pretrained(tmp_path / "plain", device_map=places, offload_folder=tmp_path / "off", **how, **eager)
            .eval()
        )

    def used(model):
        found = [outputs(model, device)]
        model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
        found.append(outputs(model, device))
        merged = model.merge_and_unload()
        found.append(outputs(merged, device))
        merged.save_pretrained(tmp_path / "merged")
        return found, load_file(tmp_path / "merged" / "model.safetensors")

    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(load({"": device}), lora).save_pretrained(tmp_path / "adapter")
    expected, saved = used(load({"": device}))
    model = load({"": device, **away})
    assert any(parameter.is_meta for parameter in model.parameters())
    found, again = used(model)
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(expected[0], expected[1]), "the adapter has a part in it"
    assert again.keys() == saved.keys() and all(torch.equal(again[key], saved[key]) for key in saved)
