"""Offloading a model that has adapters leaves some of them on the meta device, and the answer is garbage.

``cpu_offload``, ``disk_offload`` and ``dispatch_model`` put a hook on each module that has parameters, which brings
them when that module is called. Some kinds of adapters have theirs in a ``ParameterDict`` (HIRA, LoHa, LoKr, LILY,
VeRA, DoRA's magnitudes), which is never called: they stay on meta, and a CPU multiplies by whatever lies in memory,
silently. Others read the weight of their base layer, which is brought in the base layer's own forward alone, and die.
On 4-bit layers all of them die (``Cannot copy out of meta tensor``) unless ``bitsandbytes-params4bit-meta`` is in.

The repair lets a layer of peft that is offloaded bring what is below it, adapters and base layer, for the whole of
its own forward, as ``peft-adapters-on-meta`` does for adapters that are put on an offloaded model. Such adapters
cannot be trained: accelerate drops their gradients after backward, unpatched without a word. Gradients of the inputs
are right, and stay so; the step of an optimizer that holds such adapters is an error, which says what to do. Other
modules, and models that are not offloaded, are as they were. All releases of peft and accelerate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ..helpers.adapters import held
from ..helpers.offload import lost_gradients

if TYPE_CHECKING:
    from torch.nn import Module


def children(module: Module, offload: bool) -> Iterator[tuple[str, Any]]:
    """``module.named_children()``; a layer of peft that is offloaded is to bring them itself."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if offload and tuners is not None and isinstance(module, tuners.BaseTunerLayer):
        held.hold(module)
        lost_gradients.remember(module)
        if _watch not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_watch)
    return module.named_children()


def _watch(layer: Module, args: Any) -> None:
    """Called when the weights below ``layer`` are there: a gradient of one that is offloaded will be lost."""
    import torch

    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        lost_gradients.watch(layer)


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
    return Finding(wrong, "the answer is what lay in memory" if wrong else "the same bits as without offload")


PATCH = Patch(
    id="peft-adapters-offloaded",
    summary="offloading a model with adapters silently drops the values of adapters in a ParameterDict",
    links=("https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/hooks.py#L473",),
    requires=("peft>=0.14", "accelerate>=0.26.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            "accelerate.hooks:attach_align_device_hook",
            find="module.named_children()",
            replace="_patches_children(module, offload)",
            names={"_patches_children": children},
        ),
    ),
    defect=defect,
)
