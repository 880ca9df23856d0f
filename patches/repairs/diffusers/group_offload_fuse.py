"""Fusing LoRA into a model that diffusers offloads in groups fails in the next call, or fuses with uninitialized memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ...offload import group_files
from ..reproducers import image_models

if TYPE_CHECKING:
    from torch.nn import Module


def apply_to_weights(apply: Callable[..., Any], model: Module) -> Callable[..., Any]:
    """Return ``apply`` of ``model``, which fuses LoRA in its layers or undoes it; after it the groups are made anew."""
    from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading as reapply

    return group_files.change_weights(apply, model, reapply)


def defect() -> Finding:
    """Fuse LoRA into a tiny FLUX in 4 bits that is offloaded to the disk in groups, and run it."""
    import tempfile

    import torch
    from peft import LoraConfig

    def run(offload_to: str | None) -> Any:
        model = image_models.load_flux(base, load_in_4bit=True, bnb_4bit_quant_type="nf4").eval()
        torch.manual_seed(1)
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False))
        if offload_to is not None:
            cpu = torch.device("cpu")
            model.enable_group_offload(cpu, offload_type="leaf_level", offload_to_disk_path=offload_to)
        model.fuse_lora()
        return model(**image_models.flux_inputs(torch.float32)).sample

    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as folder, torch.no_grad():
        image_models.save_flux(base)
        expected = run(None)
        try:
            error = ((run(folder) - expected).norm() / expected.norm()).item()
        except (KeyError, RuntimeError) as raised:
            return Finding(True, f"{type(raised).__name__} in the call after fuse_lora()")
    return Finding(not error == 0, f"the output after fuse_lora() is {error:.1e} off")


PATCH = Patch(
    id="diffusers-group-offload-fuse",
    summary="fuse_lora() of a quantized model that diffusers offloads in groups: KeyError, or LoRA fused with uninitialized memory",
    groups=("offload", "merge"),
    silent=True,
    links=("https://github.com/huggingface/diffusers/pull/11682",),
    why="""
        TODO
    """,
    repair="""
        TODO
    """,
    requires=("diffusers>=0.35", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        *group_files.OWN_FILES,
        *(
            Rewrite.to_call(
                f"diffusers.loaders.peft:PeftAdapterMixin.{name}", "self.apply", apply_to_weights, "self.apply, self"
            )
            for name in ("fuse_lora", "unfuse_lora")
        ),
    ),
    defect=defect,
)
