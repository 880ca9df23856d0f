"""LoRA on quantized experts of which half wait on the CPU or on the disk: it trains and merges what it does on the whole model."""

from __future__ import annotations

import gc
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers

import patches
from patches.engine.gate import satisfied
from patches.experts import dense_operations
from patches.experts.packed_experts import PackedExperts
from patches.experts.tensor import QuantizedExperts
from patches.experts.experts_on_disk import ExpertsMap

from .models import IDS, SOME, loaded, saved

pytestmark = pytest.mark.skipif(satisfied("transformers<5"), reason="transformers 4 keeps experts as linear layers")

ATTENTION = ["self_attn", "lm_head"]
"""In floating point: of a 4-bit layer in memory bitsandbytes multiplies in bfloat16 where the CPU can."""
INT8 = {"load_in_4bit": False, "load_in_8bit": True}


@pytest.fixture(scope="module", autouse=True)
def unpatched():
    with patches.applied():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def names_in(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedExperts)]


def load(folder, where: str, tmp_path, **config: Any) -> Any:
    """Experts of the first layer on the CPU or the disk, or all of the model on the CPU, or ``"whole"``."""
    with patches.quantize_experts():
        config = {"llm_int8_skip_modules": ATTENTION, **config}
        whole = loaded(folder, **config)
        if where == "all on the CPU":
            return accelerate.cpu_offload(whole, execution_device=torch.device("cpu"))
        holders = list(dict.fromkeys(name.rpartition(".")[0] for name in names_in(whole)))
        if where == "cpu":
            accelerate.cpu_offload(whole.get_submodule(holders[0]), execution_device=torch.device("cpu"))
        if where != "disk":
            return whole
        tensors = dict([*whole.named_parameters(remove_duplicate=False), *whole.named_buffers()])
        places = {n: "cpu" for n in tensors if n.rpartition(".")[0] != holders[0]} | {holders[0]: "disk"}
        given = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32, **config}
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, device_map=places, offload_folder=tmp_path / "offload",
            quantization_config=transformers.BitsAndBytesConfig(**given), experts_implementation="eager",
        )  # fmt: skip


def with_lora(model: Any, attention: bool = True) -> Any:
    names = sorted({".".join(name.split(".")[-2:]) for name in names_in(model)})
    torch.manual_seed(1)
    modules = ["q_proj"] if attention else []
    config = peft.LoraConfig(r=4, target_modules=modules, target_parameters=names, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def steps(model: Any, reentrant: bool | None) -> list[torch.Tensor]:
    """Logits and gradients of two steps; ``reentrant``: None is without checkpointing."""
    model = with_lora(model).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        out = model(input_ids=IDS, labels=IDS)
        out.loss.backward()
        optimizer.step()
        found += [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]
    return found


def same(folder, tmp_path, where: str, reentrant: bool | None, **config: Any) -> None:
    expected = steps(load(folder, "whole", tmp_path, **config), reentrant)
    dense_operations.COUNTS.clear()
    got = steps(load(folder, where, tmp_path, **config), reentrant)
    assert len(got) == len(expected) > 8 and all(map(torch.equal, got, expected))
    assert not dense_operations.COUNTS


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("reentrant", [None, True])
def test_it_trains_what_the_whole_model_trains(folder, tmp_path, where, reentrant):
    same(folder, tmp_path, where, reentrant)


@pytest.mark.release("test_it_trains_what_the_whole_model_trains")
@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("config", [{}, INT8], ids=["nf4", "int8"])
@pytest.mark.parametrize("kind", [*SOME, "gemma4", "deepseek_v3", "glm4_moe", "qwen3_5_moe", "olmoe"])
def test_it_trains_each_architecture(tmp_path, kind, where, config):
    for reentrant in (None, False, True):
        same(saved(tmp_path, kind), tmp_path, where, reentrant, **config)


def test_a_saved_view_keeps_no_experts_and_reads_one(folder, tmp_path, monkeypatch):
    """Between forward and backward; without checkpointing."""
    import safetensors

    model = with_lora(load(folder, "disk", tmp_path)).train()
    whole = next(n for n in load(folder, "whole", tmp_path).model.layers[0].mlp.experts.parameters())
    loss = model(input_ids=IDS, labels=IDS).loss
    gc.collect()
    alive = [one for one in gc.get_objects() if isinstance(one, PackedExperts) and one is not whole.packed]
    codes = [one.parts[0].codes for one in alive if one.shape == whole.shape and one.device.type == "cpu"]
    assert codes and not any(each.equal(whole.codes_0) for each in codes), "those of the second layer alone"
    monkeypatch.setattr(safetensors.torch, "load_file", None)
    loss.backward()


@pytest.mark.parametrize("where", ["all on the CPU", "disk"])
def test_merging_changes_what_is_merged_into_and_nothing_else(folder, tmp_path, where):
    """Experts of two layers have the same shape, and no memory of their own: an address told them apart from nothing."""
    results = []
    for place in ("whole", where):
        model, found = with_lora(load(folder, place, tmp_path), attention=False).eval(), []
        before = model(IDS).logits
        with torch.no_grad():
            for change in (model.merge_adapter, model.unmerge_adapter, model.merge_and_unload):
                changed = change() or model
                found.append(changed(IDS).logits)
        assert torch.equal(found[1], before) and torch.equal(found[0], found[2])
        assert not torch.equal(found[0], before)
        results.append(found)
    assert all(map(torch.equal, *results))
    if where == "disk":
        hook = changed.model.layers[0].mlp.experts._hf_hook
        kept = hook.weights_map.dataset.state_dict
        assert isinstance(kept, ExpertsMap) and all(map(kept.waits, kept)), "on the disk again"
