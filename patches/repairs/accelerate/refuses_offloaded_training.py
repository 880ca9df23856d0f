"""The Trainer refuses to train adapters on a quantized model that is offloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import CannotShow, Finding, Message, Patch, Rewrite
from ...engine.gate import satisfied
from ...offload import offloaded_modules
from ..reproducers import tiny_models
from ..reproducers.quantized_models import load_quantized

if TYPE_CHECKING:
    from accelerate import Accelerator


def devices_of(model: Any, accelerator: Accelerator) -> set[Any]:
    """Return the devices in the map of ``model`` that matter to ``accelerator``."""
    devices = set(model.hf_device_map.values())
    alone = accelerator.distributed_type.value == "NO"
    return devices - {"cpu", "disk"} if alone and offloaded_modules.is_trainable_offloaded(model) else devices


def defect() -> Finding:
    """Prepare LoRA on a tiny INT8 Llama that has its head on the disk."""
    import tempfile

    import torch
    from accelerate import Accelerator, dispatch_model
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    if not satisfied("accelerate>=1.1"):
        raise CannotShow("accelerate before 1.1 refuses such models in other code, which the patch does not change")
    int8 = BitsAndBytesConfig(load_in_8bit=True)
    model = load_quantized(tiny_models.make_llama(), int8, device_map={"": "cpu"})
    with tempfile.TemporaryDirectory() as folder:
        device_map = {"model": "cpu", "lm_head": "disk"}
        dispatch_model(model, device_map, main_device="cpu", offload_dir=folder, force_hooks=True)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        try:
            Accelerator(cpu=True).prepare_model(model)
        except ValueError as error:
            return Finding(True, f"ValueError: {error}")
    trained = all(p.device == torch.device("cpu") for p in model.parameters() if p.requires_grad)
    return Finding(not trained, "prepared")


PATCH = Patch(
    id="accelerate-refuses-offloaded-training",
    summary="the Trainer refuses adapters on a quantized model with layers on disk",
    groups=("offload", "train"),
    messages=(
        Message(
            "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk offload.",
            "accelerate/accelerator.py",
        ),
    ),
    links=("https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py#L1871",),
    why="""
        ``prepare_model`` raises ``You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU
        or disk offload`` for every quantized model with "disk" in its device map, and on XPU for "cpu". This was
        justified: adapters were on meta, and backward through offloaded INT8 layers failed. Both work with
        ``peft-adapters-on-meta``, ``bitsandbytes-int8-backward-live-state`` and ``bitsandbytes-params4bit-meta``.
    """,
    repair="""
        With the repair, this check ignores "cpu" and "disk" if three conditions hold: accelerate's hooks bring
        whatever is offloaded, no offloaded parameter is trained, and there is one process. Otherwise it raises the
        error as before. The same line also refused a model whose device map has one device beside "cpu" and "disk".
        That device is now checked like any other.
    """,
    requires=("accelerate>=1.1", "bitsandbytes>=0.46.1", "transformers>=4.53", "peft>=0.14"),
    tested_up_to="1.15.0",
    edits=(
        Rewrite.to_call(
            "accelerate.accelerator:Accelerator.prepare_model",
            find="set(model.hf_device_map.values())",
            function=devices_of,
            arguments="model, self",
        ),
    ),
    defect=defect,
)
