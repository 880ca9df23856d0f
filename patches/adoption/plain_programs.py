"""Programs without a quantized weight: patches of the libraries that they use must not change them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .digests import digest_of_results
from .tiny import logits_of, plain_llama, saved_and_loaded_adapter, token_ids, train_two_steps, with_lora


def train_in_a_loop() -> str:
    model = plain_llama()
    return digest_of_results(train_two_steps(model), model.state_dict())


def train_with_trainer() -> str:
    from transformers import Trainer, TrainingArguments

    model = plain_llama()
    rows = [{"input_ids": row, "labels": row} for row in token_ids().repeat(2, 1)]
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, use_cpu=True, **quiet
        )
        result = Trainer(model=model, args=options, train_dataset=rows).train()
    return digest_of_results(result.global_step, result.training_loss, model.state_dict())


def save_in_several_files() -> str:
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory() as name:
        plain_llama().save_pretrained(name, max_shard_size="100KB")
        folder = Path(name)
        files = {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
        assert len(files) > 1
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        loaded = LlamaForCausalLM.from_pretrained(name)
    return digest_of_results(files, index, loaded.state_dict(), logits_of(loaded))


def offload_to_cpu() -> str:
    import torch
    from accelerate import cpu_offload

    model = cpu_offload(plain_llama(), execution_device=torch.device("cpu"))
    return digest_of_results(
        logits_of(model), logits_of(model), [parameter.device.type for parameter in model.parameters()]
    )


def load_by_device_map() -> str:
    from transformers import LlamaForCausalLM

    disk = {"model.layers.1": "disk", "model.norm": "disk"}
    device_map = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
        **disk,
    }
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as offload:
        plain_llama().save_pretrained(folder)
        model = LlamaForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=offload)
        devices = {name: parameter.device.type for name, parameter in model.named_parameters()}
        return digest_of_results(logits_of(model), logits_of(model), devices)


def compile_a_layer() -> str:
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    x = torch.randn(4, 64, requires_grad=True)
    y = torch.compile(layers, backend="eager")(x)
    y.square().mean().backward()
    return digest_of_results(y, x.grad, [parameter.grad for parameter in layers.parameters()])


def compile_lora() -> str:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    model = get_peft_model(layers, LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))
    compiled: Any = torch.compile(model, backend="aot_eager")
    y = compiled(torch.randn(4, 64))
    y.square().mean().backward()
    return digest_of_results(y, [parameter.grad for parameter in model.parameters()])


def train_save_and_load_lora() -> str:
    model = with_lora(plain_llama())
    results = train_two_steps(model)
    loaded = saved_and_loaded_adapter(model, plain_llama())
    return digest_of_results(results, logits_of(model), logits_of(loaded), loaded.state_dict())


def merge_and_unmerge_lora() -> str:
    model = with_lora(plain_llama())
    before = logits_of(model)
    model.merge_adapter()
    merged = logits_of(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.unmerge_adapter()
    return digest_of_results(
        before, merged, logits_of(model), model.state_dict(), model.merge_and_unload().state_dict()
    )


def train_dora() -> str:
    model = with_lora(plain_llama(), use_dora=True)
    return digest_of_results(train_two_steps(model), logits_of(model))


PROGRAMS: Mapping[str, Callable[[], str]] = {
    "train a plain Llama in a loop": train_in_a_loop,
    "train a plain Llama with the Trainer": train_with_trainer,
    "save a plain Llama in several files and load it": save_in_several_files,
    "offload a plain Llama to the CPU with accelerate": offload_to_cpu,
    "load a plain Llama with a device map that has layers on the disk": load_by_device_map,
    "compile a plain layer and train it": compile_a_layer,
    "compile a LoRA on plain layers and train it": compile_lora,
    "train a LoRA on a plain Llama, save the adapter and load it": train_save_and_load_lora,
    "merge a LoRA into a plain Llama and unmerge it": merge_and_unmerge_lora,
    "train a DoRA on a plain Llama": train_dora,
}
"""By what a user does."""
