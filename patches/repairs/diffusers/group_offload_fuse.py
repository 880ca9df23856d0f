"""Fusing LoRA into a model that diffusers offloads in groups fails in the next call, or fuses with uninitialized memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ...offload import group_files
from ..reproducers import image_models
from ..reproducers.offloaded_groups import offload_to_disk

if TYPE_CHECKING:
    from torch.nn import Module


def _changing_weights(model: Module) -> AbstractContextManager[None]:
    from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading as reapply

    return group_files.changing_weights(model, reapply)


def apply_to_weights(apply: Callable[..., Any], model: Module) -> Callable[..., Any]:
    """Return ``apply`` of ``model``, which fuses LoRA in its layers or undoes it; after it the groups are made anew."""

    def run(function: Callable[[Module], None]) -> Any:
        with _changing_weights(model):
            return apply(function)

    return run


def modules_that_change(model: Module) -> Iterator[Module]:
    """Yield ``model.modules()``, of which some are fused; after the last the groups of ``model`` are made anew."""
    with _changing_weights(model):
        yield from model.modules()


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
            offload_to_disk(model, offload_to)
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


_LOADERS = "diffusers.loaders"

PATCH = Patch(
    id="diffusers-group-offload-fuse",
    summary="fuse_lora() of a quantized model that diffusers offloads in groups: KeyError, or LoRA fused with uninitialized memory",
    groups=("offload", "merge"),
    silent=True,
    links=("https://github.com/huggingface/diffusers/pull/11682",),
    why="""
        peft merges an adapter into a quantized layer by giving it a new weight. diffusers keeps references to the
        weights of a group, and ``fuse_lora()`` and ``unfuse_lora()`` do not update these references. With a stream the
        next call raises ``KeyError: Parameter containing: ...``. With ``offload_to_disk_path`` the adapter is merged
        into the uninitialized memory that takes the place of the weights, and the output is noise or NaN; plain models
        lose the adapter as well. This affects diffusers 0.35 to 0.42.
    """,
    repair="""
        With the repair weights that are on the disk are read before they are fused, and the groups are made again
        afterwards, as ``load_lora_weights`` does.
    """,
    cost="""
        While LoRA is fused into a model on the disk, the whole model is in CPU memory.
    """,
    requires=("diffusers>=0.35", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        *group_files.OWN_FILES,
        *(
            Rewrite.to_call(
                f"{_LOADERS}.peft:PeftAdapterMixin.{name}", "self.apply", apply_to_weights, "self.apply, self"
            )
            for name in ("fuse_lora", "unfuse_lora")
        ),
        *(
            Rewrite.to_call(f"{_LOADERS}.lora_base:{name}", f"{model}.modules()", modules_that_change, model)
            for name, model in (
                ("LoraBaseMixin.unfuse_lora", "model"),
                ("fuse_text_encoder_lora", "text_encoder"),
                ("unfuse_text_encoder_lora", "text_encoder"),
            )
        ),
    ),
    defect=defect,
)
