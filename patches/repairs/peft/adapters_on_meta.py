"""Adapters that are added to an offloaded model are created on the meta device and lose their values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ...adapters import hold_base_weights
from ...engine import Finding, Message, Part, Patch, Rewrite
from ...offload import offloaded_modules
from ...quantized import accelerate_hooks

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


@contextlib.contextmanager
def with_weights(context: AbstractContextManager[None], model: Module, parent: Module, name: str) -> Iterator[None]:
    """Bring the weights of the module ``name`` of ``parent``, which gets an adapter inside of ``context``."""
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
    """Return the device where ``weight`` is when ``base_layer`` runs."""
    there = offloaded_modules.execution_device(base_layer) if weight.is_meta else None
    return weight.device if there is None else there


def values(module: Any) -> torch.Tensor:
    """Return the weight of ``module``, or the tensor that it is brought from."""
    hook = accelerate_hooks.hook_of(module)
    weight: torch.Tensor = module.weight if hook is None else hook.weights_map["weight"]
    return weight


def defect_layers() -> Finding:
    """Add LoRA to a linear layer that accelerate keeps in CPU memory."""
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


def device_of(model: Any) -> torch.device | str | None:
    """Return the device that ``model`` tells, or the device of its forward if its first parameter is offloaded."""
    device: torch.device | str | None = model.device
    there = offloaded_modules.first_execution_device(model) if str(device) == "meta" else None
    return device if there is None else there


def defect_prompts() -> Finding:
    """Add a prompt encoder to a tiny Llama in CPU memory."""
    import torch
    from accelerate import cpu_offload
    from peft import PromptTuningConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_key_value_heads=2, **size))
    cpu_offload(model, execution_device=torch.device("cpu"))
    model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    where = model.prompt_encoder["default"].embedding.weight.device
    return Finding(where.type == "meta", f"the prompt is on {where}")


_TUNERS = "peft.tuners.tuners_utils"


_BRING: dict[str, Any] = {
    "find": "ctx()",
    "replace": "_patches_with_weights(ctx(), model, parent, target_name)",
    "names": {"_patches_with_weights": with_weights},
}
_DEVICE: dict[str, Any] = {"find": "weight.device", "names": {"_patches_home": home}}

PATCH = Patch(
    id="peft-adapters-on-meta",
    summary="adapters added to an offloaded model lose their values: training fails, inference silently ignores them",
    groups=("offload", "train"),
    silent=True,
    messages=(
        Message(
            "Function MmBackward0 returned an invalid gradient at index 1 - expected device meta but got cpu",
            "figure",
            parts=("expected device meta but got",),
        ),
        Message(
            "Tensor on device cpu is not on the expected device meta!",
            "figure",
            parts=("is not on the expected device meta!",),
        ),
    ),
    links=(
        "https://github.com/huggingface/peft/issues/1639",
        "https://github.com/huggingface/peft/blob/v0.21.2/src/peft/peft_model.py",
    ),
    why="""
        peft puts a new adapter on the device of the base weight. In a model that was loaded with a device map and
        does not fit, offloaded weights are on meta between two forwards. So after ``get_peft_model`` the adapters
        of these layers have lost their initial values. The first backward raises ``Function MmBackward0 returned an
        invalid gradient at index 1 - expected device meta but got cpu``. A forward, ``generate`` and
        ``merge_and_unload`` silently ignore the adapter. Affects every kind of adapter, on plain and quantized
        layers, in every release. Adapters that are computed from the base weight (DoRA, PiSSA, OLoRA) cannot be
        created at all.

        Prompt and prefix tuning lose their encoder in the same way. ``PeftModel`` moves a new prompt encoder to the
        device of the model, which transformers reads from the first parameter, usually the embedding. If the
        embedding is offloaded (``cpu_offload``, ``disk_offload``, a device map with "cpu"), that is meta between
        two forwards. The trainable values are lost, and the first forward raises ``Tensor on device cpu is not on
        the expected device meta!``. All releases.
    """,
    repair="""
        The repair brings the base layer to its execution device while an adapter is added to it. peft then finds
        the device and values that a layer without offloading has, and if an initialization changes the base weight,
        the changed weight is offloaded. Adapters that read the base weight in their own forward (DoRA, BOFT, OFT,
        HRA and others) need it there too: their layer brings it for the whole of its forward. A layer without an
        offload hook takes the old path.

        With the repair, the encoder of prompt and prefix tuning goes to the execution device of the offloaded module.
        For any other model the device is read as before and used as it is; models outside of transformers may return
        ``"cpu"`` or None.
    """,
    cost="""
        One look at each target, and bringing each offloaded weight once.
    """,
    former_ids=("peft-prompt-encoder-on-meta",),
    parts=(
        Part(
            "layers",
            ("peft>=0.14", "accelerate>=0.26.1"),
            "0.21.2",
            (
                Rewrite(f"{_TUNERS}:BaseTuner.inject_adapter", **_BRING, when="peft<0.17"),
                Rewrite(f"{_TUNERS}:BaseTuner.inject_adapter", **_BRING, count=2, when="peft>=0.17,<0.19"),
                Rewrite(f"{_TUNERS}:BaseTuner.inject_adapter", **_BRING, count=3, when="peft>=0.19"),
                Rewrite(f"{_TUNERS}:BaseTuner._inject_parameters", **_BRING, when="peft>=0.17"),
                Rewrite(
                    f"{_TUNERS}:BaseTunerLayer._move_adapter_to_device_of_base_layer",
                    replace="_patches_home(self.get_base_layer(), weight)",
                    **_DEVICE,
                    when="peft<0.19",
                ),
                Rewrite(
                    f"{_TUNERS}:BaseTunerLayer._get_base_layer_device_and_dtype",
                    replace="_patches_home(base_layer, weight)",
                    **_DEVICE,
                    when="peft>=0.19",
                ),
                # UniLoRA and FRoD read base weights before their layers are made, or after.
                Rewrite.to_call(
                    "peft.tuners.unilora.layer:UniLoraLayer.update_scaling",
                    "base_layer.weight.device",
                    home,
                    "base_layer, base_layer.weight",
                    when="peft>=0.20",
                ),
                Rewrite.to_call(
                    "peft.tuners.frod.model:FrodModel._init_frod_projections",
                    "module.weight",
                    values,
                    "module",
                    when="peft>=0.20",
                    count=2,
                ),
            ),
            defect_layers,
        ),
        Part(
            "prompts",
            ("peft>=0.14", "accelerate>=0.26.1", "transformers>=4.53"),
            "0.21.2",
            (Rewrite.to_call("peft.peft_model:PeftModel._setup_prompt_encoder", "self.device", device_of, "self"),),
            defect_prompts,
        ),
    ),
)
