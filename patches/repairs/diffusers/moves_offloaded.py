"""A pipeline with quantized models that accelerate offloads is moved, or loses its hooks, with an error about meta tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...engine import CannotShow, Finding, Message, Patch, Rewrite
from ...quantized import accelerate_hooks
from ...quantized.four_bit import quant_states
from ...quantized.int8 import row_scales
from ..reproducers import image_models

if TYPE_CHECKING:
    from torch.nn import Module


def _offloaded(components: dict[str, Any]) -> Iterator[tuple[str, Module, bool]]:
    """Yield the quantized models that hooks of accelerate offload, with their names; and whether they lose weights without."""
    import torch

    for name, model in components.items():
        if not isinstance(model, torch.nn.Module):
            continue
        hooks = [(layer, accelerate_hooks.hook_of(layer)) for layer in model.modules()]
        offloaded = [(layer, hook) for layer, hook in hooks if hook is not None]
        if any(map(_is_quantized, (layer for layer, _ in offloaded))):
            places = [place for _, hook in offloaded for place in hook.original_devices.values()]
            yield name, model, any(place.type == "meta" for place in places)


def _is_quantized(layer: Module) -> bool:
    weight = layer._parameters.get("weight")
    return weight is not None and (quant_states.get_quant_state(weight) is not None or row_scales.is_int8(weight))


def check_can_move(components: dict[str, Any], device: Any) -> dict[str, Any]:
    """Return ``components`` of a pipeline that is moved to ``device``; raise ``ValueError`` if it cannot be moved."""
    for name, model, on_disk in _offloaded(components) if device is not None else ():
        how = (
            f"Load {name!r} again without a device_map, or move the other components: pipe.vae.to({str(device)!r})"
            if on_disk
            else "Remove the hooks first: pipe.remove_all_hooks()"
        )
        raise ValueError(
            f"The pipeline cannot be moved to {device}, because hooks of accelerate offload quantized layers of {name!r} "
            f"({type(model).__name__}), which have no weights between calls. {how}."
        )
    return components


def check_can_lose_hooks(components: dict[str, Any]) -> dict[str, Any]:
    """Return ``components`` of a pipeline that is to lose its hooks; raise ``ValueError`` if weights would be lost with them."""
    for name, model, on_disk in _offloaded(components):
        if on_disk:
            raise ValueError(
                f"{name!r} ({type(model).__name__}) was loaded with quantized layers on the disk, which its hooks bring. "
                "Without the hooks the layers would have no weights, so the pipeline cannot be offloaded in another way. "
                "Use it as it is, and move the other components (pipe.vae.to('cuda')); or load this one again without "
                "'disk' in its device_map."
            )
    return components


def defect() -> Finding:
    """Offload a pipeline with a transformer in 4 bits layer by layer, and move it."""
    import tempfile

    try:
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
    except (ImportError, RuntimeError) as error:
        raise CannotShow("the pipelines of this release of diffusers cannot be imported on this stack") from error

    with tempfile.TemporaryDirectory() as base:
        image_models.save_flux(base)
        transformer = image_models.load_flux(base, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    none = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **none)
    pipe.enable_sequential_cpu_offload(device="cpu")
    try:
        pipe.to("cpu")
    except NotImplementedError as error:
        return Finding(True, f"NotImplementedError: {str(error)[:40]}")
    except ValueError as error:
        return Finding("'transformer'" not in str(error), f"ValueError that names the transformer: {str(error)[:40]}")
    return Finding(False, "the pipeline is moved")


PATCH = Patch(
    id="diffusers-moves-offloaded",
    summary="moving a pipeline whose quantized models are offloaded raises an error about meta tensors, and half of it is moved",
    groups=("offload", "move"),
    messages=(
        Message(
            "Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() instead of torch.nn.Module.to() when moving module from meta to a different device.",
            "torch/nn/modules/module.py",
            parts=("Cannot copy out of meta tensor; no data!",),
        ),
    ),
    links=("https://github.com/huggingface/diffusers/issues/9953",),
    why="""
        After ``pipe.enable_sequential_cpu_offload()``, ``pipe.to("cuda")`` raises a ``ValueError`` that says why, but
        not if a component is quantized. Then, and with ``pipe.to("cpu")``, the error is ``Cannot copy out of meta
        tensor``, and the components before it are moved. The same holds for a component that was loaded with a device
        map over the CPU or the disk: ``You can't move a model that has some modules offloaded to cpu or disk.``
        ``enable_model_cpu_offload()``, ``enable_sequential_cpu_offload()`` and ``remove_all_hooks()`` take away the
        hooks that read quantized layers from the disk. Those layers have no weights from then on. diffusers 0.33 to
        0.42.
    """,
    repair="""
        With the repair each of these calls raises a ``ValueError`` before it changes anything. The error names the
        component and says what works: ``pipe.remove_all_hooks()`` first, or another device map. Pipelines without
        offloaded quantized layers are not concerned.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1", "accelerate>=1.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite(
            "diffusers.pipelines.pipeline_utils:DiffusionPipeline.to",
            find="any(any(_check_bnb_status(module)) for _, module in self.components.items())",
            replace="any(any(_check_bnb_status(module)) for _, module in _patches_can_move(self.components, device).items())",
            names={"_patches_can_move": check_can_move},
        ),
        Rewrite(
            "diffusers.pipelines.pipeline_utils:DiffusionPipeline.remove_all_hooks",
            find="self.components",
            replace="_patches_can_lose_hooks(self.components)",
            names={"_patches_can_lose_hooks": check_can_lose_hooks},
        ),
    ),
    defect=defect,
)
