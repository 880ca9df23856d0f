"""Adapters loaded into an offloaded model: by peft, by transformers, saved again; the model stays offloaded.

Also of ``peft-load-adapter-offloaded``, ``peft-load-adapter-offloaded``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import patches
from patches.engine.gate import satisfied
from patches.quantized import accelerate_hooks
from tests.repairs.peft.offloading import KINDS, assert_same, logits, lora, offloaded, quantization, step, ways, whole

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.one_in(2)

SOME = [
    (kind, way) for kind in KINDS for way in ways(kind) if kind == "plain" or way in ("dispatch_model", "disk_offload")
]


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on disk, with a head of its own."""
    folder = tmp_path_factory.mktemp("adapter")
    lora(whole(base, "plain"), target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]).save_pretrained(
        folder
    )
    return folder


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True], ids=["", "low_cpu_mem_usage"])
@pytest.mark.parametrize("kind, way", SOME)
def test_from_pretrained(kind, way, low_cpu_mem_usage, adapter, base, device):
    options = {"is_trainable": True, "low_cpu_mem_usage": low_cpu_mem_usage}
    with patches.applied():
        model = offloaded(base, kind, way, device)
        before = sum(accelerate_hooks.hook_of(m) is not None for m in model.modules())
        loaded = peft.PeftModel.from_pretrained(model, adapter, **options).train()
        assert sum(accelerate_hooks.hook_of(m) is not None for m in model.modules()) == before > 0
        assert_same(
            step(loaded), step(peft.PeftModel.from_pretrained(whole(base, kind, device), adapter, **options).train())
        )


@pytest.mark.parametrize("kind, way", SOME)
def test_load_adapter(kind, way, adapter, base, device):
    """Over the adapter that is there, as the Trainer does to resume, and as a second one."""

    def loaded(model: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(2)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, config)
        model.load_adapter(adapter, "default", is_trainable=True)
        model.load_adapter(adapter, "second")
        return model.train()

    with patches.applied():
        got, expected = loaded(offloaded(base, kind, way, device)), loaded(whole(base, kind, device))
        assert_same(step(got), step(expected))
        for model in (got, expected):
            model.set_adapter("second")
        assert torch.equal(logits(got), logits(expected))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_base_and_adapter_in_one_call(kind, base, tmp_path):
    """``AutoPeftModel`` gives its device map to the base model alone."""
    with patches.applied():
        lora(whole(base, "plain"), target_modules=["q_proj", "down_proj"]).save_pretrained(tmp_path)
        load = peft.AutoPeftModelForCausalLM.from_pretrained
        disk = {"": "cpu", "model.layers.1": "disk"}
        got, expected = (
            load(tmp_path, device_map=places, offload_folder=tmp_path / "off", **quantization(kind))
            for places in (disk, {"": "cpu"})
        )
        assert got.get_base_model().model.layers[1].mlp.up_proj.weight.is_meta
        assert torch.equal(logits(got), logits(expected))


@pytest.mark.parametrize("kind, way", SOME)
def test_save_adapter(kind, way, base, tmp_path, device):
    from safetensors.torch import load_file

    with patches.applied():
        for folder, model in (("off", offloaded(base, kind, way, device)), ("whole", whole(base, kind, device))):
            lora(model, modules_to_save=["lm_head"], target_modules=["q_proj"]).save_pretrained(tmp_path / folder)
        got, expected = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("off", "whole"))
        assert_same(got, expected)


@pytest.mark.skipif(
    satisfied("transformers>=5.24") and satisfied("peft<0.22"),
    reason="model.load_adapter of transformers 5.24 refuses peft before 0.22",
)
@pytest.mark.parametrize("kind, way", SOME)
def test_through_transformers(kind, way, base, tmp_path, device):
    """``model.load_adapter`` and ``model.add_adapter``, transformers' own."""
    with patches.applied():
        lora(whole(base, "plain"), target_modules=["q_proj", "v_proj"]).save_pretrained(tmp_path)
        got, expected = offloaded(base, kind, way, device), whole(base, kind, device)
        without = logits(expected)
        for model in (got, expected):
            model.load_adapter(str(tmp_path))
        assert torch.equal(logits(got), logits(expected)) and not torch.equal(logits(got), without)

        got, expected = offloaded(base, kind, way, device), whole(base, kind, device)
        for model in (got, expected):
            torch.manual_seed(1)
            model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        assert_same(step(got.train()), step(expected.train()))
