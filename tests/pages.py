"""The programs that README and the pages show, and what each needs to run here: names, and smaller figures.

``GIVEN`` makes the names that a page takes as known; ``SMALLER`` are replacements that fit a model of this machine.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOT_RUN = {
    "FluxPipeline.from_pretrained(": "a pipeline; tests/device/cases_diffusers.py loads one and runs it on a simulated device"
}
"""Words of the programs that are not run, and why."""


def programs(page: str) -> dict[int, str]:
    """Return the Python programs on ``page`` by the number of the line that each begins with."""
    text = (ROOT / page).read_text("utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)
    return {text.count("\n", 0, match.start()) + 1: match[1] for match in found}


def llama(folder: str) -> dict[str, Any]:
    """What the programs about a language model take as known."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from tests.stacks import models

    models.save_base(folder)
    names = {"name": folder, "ids": models.ids(), "torch": torch}
    ours = {each.__name__: each for each in (LoraConfig, get_peft_model, prepare_model_for_kbit_training)}
    theirs = {name: getattr(transformers, name) for name in ("AutoModelForCausalLM", "BitsAndBytesConfig")}
    return {**names, **ours, **theirs}


def trained(folder: str) -> dict[str, Any]:
    """A loaded model and its optimizer."""
    import torch
    from tests.stacks import models

    models.save_base(folder)
    model = models.lora(models.load(folder, "4-bit"))
    return {"model": model, "optimizer": torch.optim.AdamW(models.trained(model))}


def compiling(folder: str) -> dict[str, Any]:
    """A model, and a trainer that compiles it."""
    import torch
    import transformers
    from accelerate import Accelerator
    from tests.stacks import models

    import patches

    models.save_base(folder)
    model = models.lora(models.load(folder, "4-bit"))
    rows = [{"input_ids": models.ids()[0], "labels": models.ids()[0]}]
    arguments = transformers.TrainingArguments(
        f"{folder}/out", max_steps=1, torch_compile=True, use_cpu=True, report_to=[]
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    return {"torch": torch, "model": model, "trainer": trainer, "patches": patches, "Accelerator": Accelerator}


def mixture(folder: str) -> dict[str, Any]:
    """A mixture of experts on disk."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2)).save_pretrained(folder)
    return {}


def flux(folder: str) -> dict[str, Any]:
    """A transformer of FLUX on disk."""
    from peft import LoraConfig

    from patches.repairs.reproducers import image_models

    image_models.save_flux(f"{folder}/transformer")
    return {"LoraConfig": LoraConfig}


GIVEN: dict[str, Callable[[str], dict[str, Any]]] = {
    "README.md": llama,
    "docs/compile_options.md": compiling,
    "docs/diffusers.md": flux,
    "docs/does_not_fit.md": llama,
    "docs/experts.md": mixture,
    "docs/use.md": trained,
}
SMALLER = {
    r'max_memory=\{0: "\w+", "cpu": "\w+"\}': 'max_memory={"cpu": "60KB"}',
    r'"offload"': 'folder + "/offload"',
    r'"adapter"': 'folder + "/adapter"',
    r'"Qwen/Qwen3-30B-A3B"|"black-forest-labs/FLUX.1-dev"': "folder",
    r'"some-id"': '"bitsandbytes-int8-input-dimensions"',
    r"patches\.verify\(\)": 'patches.verify("bitsandbytes-int8-input-dimensions")',
}


def run(page: str, folder: str) -> None:
    """Run the programs of ``page`` one after the other, as a reader does, with files in ``folder``; print what is there at the end."""
    import bitsandbytes  # noqa: F401

    import patches

    patches.apply()
    names = {"folder": folder, **GIVEN[page](folder)}
    for line, program in programs(page).items():
        if any(words in program for words in NOT_RUN):
            continue
        for long, short in SMALLER.items():
            program = re.sub(long, short, program)
        exec(compile("\n" * line + program, page, "exec"), names)
    model = names.get("transformer", names.get("model"))
    parts = [*model.parameters()]
    print(json.dumps({"on meta": sum(part.is_meta for part in parts), "parameters": len(parts)}))


if __name__ == "__main__":
    run(*sys.argv[1:])
