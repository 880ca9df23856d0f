"""Adapters that are added to an offloaded model are created on the meta device and lose their values.

peft puts a new adapter on the device of the base weight. In a model that was loaded with a device map and does not
fit, offloaded weights are on meta between two forwards. So after ``get_peft_model`` the adapters of these layers have
lost their initial values. The first backward raises ``Function MmBackward0 returned an invalid gradient at index 1 -
expected device meta but got cpu``. A forward, ``generate`` and ``merge_and_unload`` silently ignore the adapter.
Affects every kind of adapter, on plain and quantized layers, in every release. Adapters that are computed from the
base weight (DoRA, PiSSA, OLoRA) cannot be created at all.

The repair brings the base layer to its execution device while an adapter is added to it. peft then finds the device
and values that a layer without offloading has, and if an initialization changes the base weight, the changed weight is
offloaded. Adapters that read the base weight in their own forward (DoRA, BOFT, OFT, HRA and others) need it there too:
their layer brings it for the whole of its forward. A layer without an offload hook takes the old path.

What it costs: one look at each target, and bringing each offloaded weight once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ...adapters import hold_base_weights
from ...engine import Finding, Patch, Rewrite
from ...offload import offloaded_modules
from ...quantized import accelerate_hooks

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


@contextlib.contextmanager
def with_weights(context: AbstractContextManager[None], model: Module, parent: Module, name: str) -> Iterator[None]:
    """``context``, and inside it the weights of the module ``name`` of ``parent``, which gets an adapter there."""
    target = getattr(parent, name)
    if not offloaded_modules.is_offloaded(target):
        offloaded_modules.refuse_if_brought_by_another(target, model)
        with context:
            yield
        return
    with offloaded_modules.onload_to_change(target), context:
        yield
    hold_base_weights.hold_base_weights(getattr(parent, name))


def home(base_layer: Module, weight: torch.Tensor) -> torch.device:
    """The device where ``weight`` is when ``base_layer`` runs."""
    there = offloaded_modules.execution_device(base_layer) if weight.is_meta else None
    return weight.device if there is None else there


def values(module: Any) -> torch.Tensor:
    """The weight of ``module``, or what it is brought from."""
    hook = accelerate_hooks.hook_of(module)
    weight: torch.Tensor = module.weight if hook is None else hook.weights_map["weight"]
    return weight


def defect() -> Finding:
    """LoRA on a linear layer that accelerate keeps in CPU memory."""
    import torch
    from accelerate import cpu_offload
    from peft import LoraConfig, get_peft_model

    model = cpu_offload(torch.nn.Sequential(torch.nn.Linear(4, 4)), execution_device=torch.device("cpu"))
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["0"]))
    lost = [name for name, p in model.named_parameters() if "lora_" in name and p.is_meta]
    try:
        model(torch.ones(1, 4)).sum().backward()
    except RuntimeError as error:
        return Finding(True, f"{len(lost)} of 2 adapter weights on meta; backward: {error}")
    return Finding(bool(lost), f"{len(lost)} of 2 adapter weights on meta")


_TUNERS = "peft.tuners.tuners_utils"
_ENTER: dict[str, Any] = {
    "find": "ctx()",
    "replace": "_patches_with_weights(ctx(), model, parent, target_name)",
    "names": {"_patches_with_weights": with_weights},
}
_HOME: dict[str, Any] = {"find": "weight.device", "names": {"_patches_home": home}}

PATCH = Patch(
    id="peft-adapters-on-meta",
    summary="adapters added to an offloaded model lose their values: training fails, inference silently ignores them",
    links=("https://github.com/huggingface/peft/issues/1639",),
    requires=("peft>=0.14", "accelerate>=0.26.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(
        Rewrite(f"{_TUNERS}:BaseTuner.inject_adapter", **_ENTER, when="peft<0.17"),
        Rewrite(f"{_TUNERS}:BaseTuner.inject_adapter", **_ENTER, count=2, when="peft>=0.17,<0.19"),
        Rewrite(f"{_TUNERS}:BaseTuner.inject_adapter", **_ENTER, count=3, when="peft>=0.19"),
        Rewrite(f"{_TUNERS}:BaseTuner._inject_parameters", **_ENTER, when="peft>=0.17"),
        Rewrite(
            f"{_TUNERS}:BaseTunerLayer._move_adapter_to_device_of_base_layer",
            replace="_patches_home(self.get_base_layer(), weight)",
            **_HOME,
            when="peft<0.19",
        ),
        Rewrite(
            f"{_TUNERS}:BaseTunerLayer._get_base_layer_device_and_dtype",
            replace="_patches_home(base_layer, weight)",
            **_HOME,
            when="peft>=0.19",
        ),
        # Two kinds look at base weights before or after they are put on.
        Rewrite(
            "peft.tuners.unilora.layer:UniLoraLayer.update_scaling",
            find="base_layer.weight.device",
            replace="_patches_home(base_layer, base_layer.weight)",
            names={"_patches_home": home},
            when="peft>=0.20",
        ),
        Rewrite(
            "peft.tuners.frod.model:FrodModel._init_frod_projections",
            find="module.weight",
            replace="_patches_values(module)",
            count=2,
            names={"_patches_values": values},
            when="peft>=0.20",
        ),
    ),
    defect=defect,
)
