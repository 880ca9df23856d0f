"""Loading an adapter into an offloaded model dispatches the model a second time.

If the device map of a model names the CPU or the disk, ``PeftModel.from_pretrained`` removes accelerate's hooks.
``load_adapter`` then infers a device map from the memory that it finds, and dispatches the whole model with it:

- What was on disk has no hook in between, and the inferred map may be a single device: ``Cannot copy out of meta
  tensor; no data!``.
- What was in CPU memory is moved to the device if it has room at the moment. The user's device map is lost.
- Or the adapters are offloaded too, and nothing is trained.
- A folder that accelerate wrote (``dispatch_model``, ``disk_offload``) has no ``safetensors_file``: ``KeyError``.
- ``AutoPeftModel.from_pretrained(..., device_map=...)`` loads the base model by that map and dispatches it again by the same
  map, whose names the model under the adapter no longer has: ``KeyError``, or a weight on meta without a value.
- ``load_adapter`` alone, which the Trainer calls to resume and to load the best model, dispatches a model that still
  has its hooks.

All releases.

With the repair the model stays dispatched as it is, and the adapters go where their layers run
(``peft-adapters-on-meta``). If you pass a ``device_map`` or ``max_memory`` to ``PeftModel.from_pretrained`` or
``load_adapter``, the model is dispatched with it, as before. So is a model without hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ...offload import offloaded_modules

if TYPE_CHECKING:
    from torch.nn import Module


def stays(model: Module, asked: Mapping[str, Any]) -> bool:
    """Whether ``model`` is offloaded and nobody asks for another way."""
    return not {"device_map", "max_memory"} & asked.keys() and offloaded_modules.is_offloaded(model)


def on_base(from_pretrained: Callable[..., Any], base_model: Module) -> Callable[..., Any]:
    """``PeftModel.from_pretrained`` for ``AutoPeftModel``, by whose map ``base_model`` was loaded."""
    if not offloaded_modules.is_offloaded(base_model):
        return from_pretrained

    def without_map(*args: Any, device_map: Any = None, max_memory: Any = None, **options: Any) -> Any:
        return from_pretrained(*args, **options)

    return without_map


def defect() -> Finding:
    """Load an adapter into a linear layer on disk, and see where the layer is."""
    import tempfile

    import torch
    from accelerate import dispatch_model
    from peft import LoraConfig, PeftModel, get_peft_model

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    with tempfile.TemporaryDirectory() as adapter, tempfile.TemporaryDirectory() as folder:
        get_peft_model(model(), LoraConfig(r=2, target_modules=["1"])).save_pretrained(adapter)
        base = dispatch_model(model(), {"0": "cpu", "1": "disk"}, offload_dir=folder)
        try:
            PeftModel.from_pretrained(base, adapter)
        except (KeyError, AttributeError, NotImplementedError) as error:
            return Finding(True, f"{type(error).__name__}: {error}")
        resident = not offloaded_modules.is_offloaded(base)
    return Finding(resident, f"offloaded layers {'are moved to the device' if resident else 'stay offloaded'}")


_PEFT_MODEL = "peft.peft_model:PeftModel"
_NAMES = {"_patches_stays": stays}

PATCH = Patch(
    id="peft-load-adapter-dispatches-again",
    summary="loading an adapter dispatches an offloaded model again: it fails, or is no longer offloaded",
    links=("https://github.com/huggingface/peft/issues/2541",),
    requires=("peft>=0.14", "accelerate>=0.26.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(
        Rewrite(
            f"{_PEFT_MODEL}.from_pretrained",
            find='hasattr(model, "hf_device_map")',
            replace='hasattr(model, "hf_device_map") and not _patches_stays(model, kwargs)',
            names=_NAMES,
        ),
        Rewrite(
            f"{_PEFT_MODEL}.from_pretrained",
            find='getattr(model, "hf_device_map", None) is not None',
            replace='getattr(model, "hf_device_map", None) is not None and not _patches_stays(model, kwargs)',
            names=_NAMES,
        ),
        Rewrite(
            f"{_PEFT_MODEL}.load_adapter",
            find='getattr(self, "hf_device_map", None) is not None',
            replace='getattr(self, "hf_device_map", None) is not None and not _patches_stays(self, kwargs)',
            names=_NAMES,
        ),
        Rewrite(
            "peft.auto:_BaseAutoPeftModel.from_pretrained",
            find="cls._target_peft_class.from_pretrained",
            replace="_patches_on_base(cls._target_peft_class.from_pretrained, base_model)",
            names={"_patches_on_base": on_base},
        ),
        Rewrite(
            "peft.mixed_model:PeftMixedModel.from_pretrained",
            find='getattr(model, "hf_device_map", None) is not None',
            replace='getattr(model, "hf_device_map", None) is not None and not _patches_stays(model, kwargs)',
            names=_NAMES,
        ),
    ),
    defect=defect,
)
