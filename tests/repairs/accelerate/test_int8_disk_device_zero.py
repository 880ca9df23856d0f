"""``load_and_quantize_model`` with layers on disk, then LoRA: loss, gradients and merged model of the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import patches
from tests.repairs.peft.offloading import assert_same, device_map, logits, lora, save_base, step

pytest.importorskip("bitsandbytes")
accelerate = pytest.importorskip("accelerate")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("quantized") / "base")


@pytest.fixture
def patched() -> Iterator[None]:
    with patches.applied():
        yield


def loaded(base: Path, kind: str, folder: Path | None, device: str, skip: tuple[str, ...] = ()) -> Any:
    """Frozen, as one does who adds adapters; with layers on disk if there is a ``folder`` for them."""
    from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model
    from transformers import LlamaConfig, LlamaForCausalLM

    with accelerate.init_empty_weights():
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(base))
    bits = {"int8": {"load_in_8bit": True}, "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}[kind]
    how = BnbQuantizationConfig(**bits, torch_dtype=torch.float32, skip_modules=["lm_head", *skip])
    where = device_map(device)
    if folder is None:
        where = dict.fromkeys(where, device)
    model = load_and_quantize_model(model, how, str(base / "model.safetensors"), where, offload_folder=folder)
    return model.requires_grad_(False)


def kinds(model: Any) -> list[str]:
    return [type(layer.mlp.up_proj).__name__ for layer in model.model.layers]


def test_int8(patched, base, tmp_path, device):
    off, whole = loaded(base, "int8", tmp_path, device), loaded(base, "int8", None, device)
    assert kinds(off) == kinds(whole) == ["Linear8bitLt", "Linear8bitLt"]
    assert off.model.layers[1].mlp.up_proj.weight.is_meta
    assert torch.equal(logits(off), logits(whole))
    off, whole = lora(off), lora(whole)
    for _ in range(2):
        assert_same(step(off), step(whole))
    merged, expected = off.merge_and_unload(), whole.merge_and_unload()
    assert torch.equal(logits(merged), logits(expected))
    assert merged.model.layers[1].mlp.up_proj.weight.is_meta


def test_4bit(patched, base, tmp_path, device):
    """accelerate leaves what is on the CPU or the disk as it is, as it says."""
    off, whole = loaded(base, "nf4", tmp_path, device), loaded(base, "nf4", None, device, ("model.layers.1",))
    first = "Linear" if device == "cpu" else "Linear4bit"
    assert kinds(off) == kinds(whole) == [first, "Linear"]
    assert off.model.layers[1].mlp.up_proj.weight.is_meta
    assert_same(step(lora(off)), step(lora(whole)))
