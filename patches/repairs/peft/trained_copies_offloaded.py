"""``modules_to_save`` on an offloaded module silently trains nothing, because the copy to be trained is offloaded too.

peft deep-copies a module that is to be trained whole (``modules_to_save``, and the targets of ``LNTuningConfig``),
together with accelerate's hook, while its weights are on meta. So the copy is brought anew for every forward and
dropped after it. Its parameters are other objects each time: their gradients are lost, and the optimizer holds one
that stays on meta. There is no message. After training, the module has the values that were loaded, and
``save_pretrained`` fails on meta tensors. The copied hook also copies its map, which holds the offloaded weights of
the *whole* model. If a module has two hooks (``cpu_offload(layer)``), copying fails, because accelerate's
``SequentialHook`` cannot be copied. All releases of peft.

The repair copies the values while the module has them, and keeps the copy on the execution device with a hook that
moves its inputs there. The original stays offloaded.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from ...engine import Finding, Patch, Rewrite
from ...offload import offloaded_modules
from ...quantized import accelerate_hooks

if TYPE_CHECKING:
    from torch.nn import Module


def trainable_copy(module: Module) -> Module:
    """A deep copy of ``module`` that stays on its device, if ``module`` or a part of it is offloaded."""
    if not any(accelerate_hooks.hook_of(part, visited=True) for part in module.modules()):
        return copy.deepcopy(module)
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    hooks = {name: part._hf_hook for name, part in module.named_modules() if hasattr(part, "_hf_hook")}
    with offloaded_modules.onload(module):
        copied = copy.deepcopy(module, {id(hook): hook for hook in hooks.values()})
    for name, hook in hooks.items():
        own = accelerate_hooks.hook_of(module.get_submodule(name), visited=True) or hook
        resident = AlignDevicesHook(getattr(own, "execution_device", None), skip_keys=getattr(own, "skip_keys", None))
        add_hook_to_module(copied.get_submodule(name), resident)  # in place of the one that it shares
    return copied


def defect() -> Finding:
    """Train a layer that accelerate keeps in CPU memory for a step."""
    import torch
    from accelerate import cpu_offload
    from peft import LoraConfig, get_peft_model

    head = torch.nn.Sequential(torch.nn.Linear(4, 4))
    cpu_offload(head, execution_device=torch.device("cpu"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), head)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["0"], modules_to_save=["1"]))
    saved = dict(model.base_model.model[1].modules_to_save["default"].named_parameters())
    model(torch.ones(1, 4)).sum().backward()
    untrained = [name for name, p in saved.items() if p.is_meta or p.grad is None]
    return Finding(bool(untrained), f"{len(untrained)} of {len(saved)} parameters to train get no gradient")


PATCH = Patch(
    id="peft-trained-copies-offloaded",
    summary="modules_to_save on an offloaded module silently trains nothing",
    links=("https://github.com/huggingface/peft/blob/v0.21.2/src/peft/utils/other.py#L653",),
    requires=("peft>=0.14", "accelerate>=0.26.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(
        Rewrite(
            "peft.utils.other:ModulesToSaveWrapper.update",
            find="copy.deepcopy(self.original_module)",
            replace="_patches_trainable_copy(self.original_module)",
            names={"_patches_trainable_copy": trainable_copy},
        ),
        Rewrite(
            "peft.tuners.ln_tuning.layer:LNTuningLayer.update_layer",
            find="deepcopy(layer)",
            replace="_patches_trainable_copy(layer)",
            names={"_patches_trainable_copy": trainable_copy},
        ),
    ),
    defect=defect,
)
