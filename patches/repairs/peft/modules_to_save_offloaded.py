"""What peft trains beside adapters is offloaded with the module that it is copied from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...adapters import hold_base_weights
from ...engine import Finding, Message, Part, Patch, Rewrite, SetAttribute
from ...offload import offloaded_modules
from ...quantized import accelerate_hooks

if TYPE_CHECKING:
    from torch.nn import Module


def trainable_copy(module: Module) -> Module:
    """Return a deep copy of ``module`` that stays on its device, if ``module`` or a part of it is offloaded."""
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


def defect_modules_to_save() -> Finding:
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


def _make(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not offloaded_modules.is_offloaded(self):
            return original.__get__(self)(*args, **kwargs)
        with offloaded_modules.onload_to_change(self):
            result = original.__get__(self)(*args, **kwargs)
        hold_base_weights.hold_base_weights(self)
        return result

    return update_layer


def defect_trainable_token_indices() -> Finding:
    """Train one token of an embedding that accelerate keeps in CPU memory."""
    import torch
    from accelerate import cpu_offload
    from peft import LoraConfig, get_peft_model

    model = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4))
    cpu_offload(model[0], execution_device=torch.device("cpu"))
    config = LoraConfig(r=2, target_modules=["1"], trainable_token_indices={"0": [1]})
    try:
        model = get_peft_model(model, config)
        model(torch.arange(4)).sum().backward()
    except (NotImplementedError, RuntimeError) as error:
        return Finding(True, f"forward: {error}")
    trained = model.base_model.model[0].token_adapter.trainable_tokens_delta["default"].grad
    return Finding(trained is None, "the token is trained" if trained is not None else "no gradient")


PATCH = Patch(
    id="peft-modules-to-save-offloaded",
    summary="modules_to_save and trainable_token_indices of an offloaded module silently train nothing, or fail",
    groups=("offload", "train"),
    silent=True,
    messages=(
        Message("Cannot copy out of meta tensor; no data!", "torch/lib/libtorch_cpu.so"),
        Message(
            "Tensor on device cpu is not on the expected device meta!",
            "figure",
            parts=("is not on the expected device meta!",),
        ),
    ),
    words=("loss is nan, or does not fall",),
    links=(
        "https://github.com/huggingface/peft/blob/v0.21.2/src/peft/utils/other.py#L653",
        "https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/trainable_tokens/layer.py",
    ),
    why="""
        peft deep-copies a module that is to be trained whole (``modules_to_save``, and the targets of
        ``LNTuningConfig``), together with accelerate's hook, while its weights are on meta. So the copy is brought
        anew for every forward and dropped after it. Its parameters are other objects each time: their gradients are
        lost, and the optimizer holds one that stays on meta. There is no message. After training, the module has
        the values that were loaded, and ``save_pretrained`` fails on meta tensors. The copied hook also copies its
        map, which holds the offloaded weights of the *whole* model. If a module has two hooks
        (``cpu_offload(layer)``), copying fails, because accelerate's ``SequentialHook`` cannot be copied. All
        releases of peft.

        The layer that trains single tokens (``trainable_token_indices``) copies their rows from the base weight
        when it is made, and each forward puts the trained rows into a copy of the whole weight. If the embedding is
        offloaded, the base weight is on meta both times: ``get_peft_model`` makes a parameter on meta, and the
        first forward raises ``Cannot copy out of meta tensor; no data!``. ``peft-adapters-on-meta`` repairs
        ``TrainableTokensConfig``; ``LoraConfig`` and similar configurations wrap the embedding in another way,
        which this patch repairs. peft >= 0.15, which added it.
    """,
    repair="""
        For ``modules_to_save``, the repair copies the values while the module has them, and keeps the copy on the
        execution device with a hook that moves its inputs there. The original stays offloaded.

        For ``trainable_token_indices``, the repair makes the layer while the base weight is on the execution device,
        and brings the weight for the whole of each forward.
    """,
    former_ids=(
        "peft-trained-copies-offloaded",
        "peft-trainable-tokens-offloaded",
    ),
    parts=(
        Part(
            "modules_to_save",
            ("peft>=0.14", "accelerate>=0.26.1"),
            "0.21.2",
            (
                Rewrite.to_call(
                    "peft.utils.other:ModulesToSaveWrapper.update",
                    "copy.deepcopy(self.original_module)",
                    trainable_copy,
                    "self.original_module",
                ),
                Rewrite.to_call(
                    "peft.tuners.ln_tuning.layer:LNTuningLayer.update_layer", "deepcopy(layer)", trainable_copy, "layer"
                ),
            ),
            defect_modules_to_save,
        ),
        Part(
            "trainable_token_indices",
            ("peft>=0.15", "accelerate>=0.26.1"),
            "0.21.2",
            (
                SetAttribute(
                    "peft.tuners.trainable_tokens.layer:TrainableTokensLayer.update_layer",
                    make=_make,
                    original_contains="self._move_adapter_to_device_of_base_layer(adapter_name)",
                ),
            ),
            defect_trainable_token_indices,
        ),
    ),
)
