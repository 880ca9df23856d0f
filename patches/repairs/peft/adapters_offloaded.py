"""Offloading a model that has adapters leaves some adapters on the meta device: outputs are garbage."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...adapters import hold_base_weights
from ...engine import Finding, Patch, Rewrite
from ...offload import lost_gradients

if TYPE_CHECKING:
    from torch.nn import Module


def children(module: Module, offload: bool) -> Iterator[tuple[str, Any]]:
    """Return ``module.named_children()``; let an offloaded layer of peft bring them itself."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if offload and tuners is not None and isinstance(module, tuners.BaseTunerLayer):
        hold_base_weights.hold_base_weights(module)
        lost_gradients.remember_parameters(module)
        if _watch not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_watch)
    return module.named_children()


def _watch(layer: Module, args: Any) -> None:
    """Watch for gradients of offloaded weights below ``layer``, which are there now: such a gradient will be lost."""
    import torch

    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        lost_gradients.watch_gradients(layer)


def defect() -> Finding:
    """Offload a linear layer with a LoHa adapter to the CPU, and call it."""
    import torch
    from accelerate import cpu_offload
    from peft import LoHaConfig, get_peft_model

    def made() -> Module:
        torch.manual_seed(0)
        model: Module = get_peft_model(
            torch.nn.Sequential(torch.nn.Linear(8, 4)), LoHaConfig(r=2, target_modules=["0"], init_weights=False)
        )
        return model.eval()

    x = torch.randn(2, 8)
    with torch.no_grad():
        expected = made()(x)
        answer = cpu_offload(made(), execution_device=torch.device("cpu"))(x)
    wrong = not torch.equal(answer, expected)
    return Finding(
        wrong, "outputs are read from uninitialized memory" if wrong else "outputs equal those without offload"
    )


PATCH = Patch(
    id="peft-adapters-offloaded",
    summary="offloading a model with adapters silently drops the values of adapters in a ParameterDict",
    groups=("offload",),
    silent=True,
    links=("https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/hooks.py#L473",),
    why="""
        ``cpu_offload``, ``disk_offload`` and ``dispatch_model`` put a hook on each module with parameters, which
        brings them when that module is called. Some adapters keep theirs in a ``ParameterDict`` (HiRA, LoHa, LoKr,
        LILY, VeRA, DoRA's magnitudes), which is never called. They stay on meta, and a CPU silently multiplies by
        uninitialized memory. Other adapters read the weight of their base layer outside of that layer's forward,
        where it is not brought, and fail. On 4-bit layers all adapters fail (``Cannot copy out of meta tensor``)
        without ``bitsandbytes-params4bit-meta``.
    """,
    repair="""
        With the repair an offloaded peft layer brings everything below it, adapters and base layer, for the whole
        of its own forward, as ``peft-adapters-on-meta`` does for adapters that are added to an offloaded model.
        Adapters that were offloaded cannot be trained, because accelerate drops their gradients after backward
        (unpatched: silently). The step of an optimizer with such adapters raises an error that says what to do.
        Gradients of the inputs are right. Other modules, and models that are not offloaded, stay as they were. All
        releases of peft and accelerate.
    """,
    requires=("peft>=0.14", "accelerate>=0.26.1"),
    tested_up_to="0.21.2",
    edits=(
        Rewrite.to_call(
            "accelerate.hooks:attach_align_device_hook", "module.named_children()", children, "module, offload"
        ),
    ),
    defect=defect,
)
