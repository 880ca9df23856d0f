"""A tiny Llama on disk, the same whole and offloaded in every way that accelerate has, and one training step of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

KINDS = ("plain", "int8", "nf4")
WAYS = ("dispatch_model", "cpu_offload", "disk_offload", "layer by layer")
CHECKPOINTING = {"none": None, "non-reentrant": False, "reentrant": True}
IDS = torch.arange(20).reshape(2, 10)


def save_base(folder: Path, **options: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.06, use_cache=False, **options,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def quantization(kind: str, **options: Any) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    if kind == "plain":
        return {}
    if kind == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True, **options)}
    options |= {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    }
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options)}


def whole(base: Path, kind: str, device: str = "cpu") -> Any:
    """All of it on ``device``, in evaluation mode, as it comes."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, device_map={"": device}, **quantization(kind))


def device_map(device: str) -> dict[str, str]:
    """The first layer on ``device``, the second on disk, the head in CPU memory."""
    map_ = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), device)
    return {**map_, "model.layers.1": "disk", "lm_head": "cpu"}


def offloaded(base: Path, kind: str, way: str, device: str = "cpu", elsewhere: dict[str, str] | None = None) -> Any:
    """The same, offloaded by one of ``WAYS``, or ``from_pretrained`` with a device map (plain models).

    What ``elsewhere`` names is not where ``device_map`` has it.
    """
    import accelerate
    from transformers import AutoModelForCausalLM

    folder, map_ = tempfile.mkdtemp(dir=base.parent), {**device_map(device), **(elsewhere or {})}
    if way == "from_pretrained":
        return AutoModelForCausalLM.from_pretrained(base, device_map=map_, offload_folder=folder)
    model, execution = whole(base, kind, device), torch.device(device)
    if way == "dispatch_model":
        accelerate.dispatch_model(model, map_, main_device=device, offload_dir=folder, force_hooks=True)
    elif way == "cpu_offload":
        accelerate.cpu_offload(model, execution_device=execution)
    elif way == "disk_offload":
        accelerate.disk_offload(model, folder, execution_device=execution)
    else:
        for module in list(model.model.layers[1].modules()):
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2:
                accelerate.cpu_offload(module, execution_device=execution)
    return model


def ways(kind: str) -> tuple[str, ...]:
    return (("from_pretrained",) if kind == "plain" else ()) + WAYS


def lora(model: Any, **options: Any) -> Any:
    """``model`` with a LoRA adapter that is not zero, in training mode."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(**config)).train()


def step(model: Any) -> dict[str, torch.Tensor]:
    """Loss, logits, the parameters that are trained and their gradients, after one forward and backward."""
    model.zero_grad()
    ids = IDS.to(next(p for p in model.parameters() if p.requires_grad).device)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(p.grad is not None for p in trained.values()), "something is not trained"
    gradients = {f"{name}.grad": p.grad for name, p in trained.items()}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **gradients, **trained}


def logits(model: Any) -> torch.Tensor:
    """On the CPU: a model that moves its inputs gives its outputs back where they came from."""
    with torch.no_grad():
        return model.eval()(input_ids=IDS.to(_device(model))).logits.cpu()


def _device(model: Any) -> torch.device:
    """Where ``model`` takes its inputs; one that is offloaded whole moves them itself."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert got.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not different, different[:5]
