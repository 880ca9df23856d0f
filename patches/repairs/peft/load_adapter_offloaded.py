"""Loading an adapter into an offloaded model dispatches the model a second time, or does not load the adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...engine import CannotShow, Finding, Message, Part, Patch, Rewrite
from ...offload import offloaded_modules
from ..reproducers.adapted_layer import relative_error

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


def stays(model: Module, options: Mapping[str, Any]) -> bool:
    """Tell whether ``model`` is offloaded, and ``options`` ask for no other way."""
    return not {"device_map", "max_memory"} & options.keys() and offloaded_modules.is_offloaded(model)


def on_base(from_pretrained: Callable[..., Any], base_model: Module) -> Callable[..., Any]:
    """Return ``PeftModel.from_pretrained`` for ``AutoPeftModel``, which loaded ``base_model`` by its device map."""
    if not offloaded_modules.is_offloaded(base_model):
        return from_pretrained

    def without_map(*args: Any, device_map: Any = None, max_memory: Any = None, **options: Any) -> Any:
        return from_pretrained(*args, **options)

    return without_map


def device_of(model: Any) -> str | int | torch.device:
    """Return the device to which the file of an adapter is read."""
    there = offloaded_modules.first_execution_device(model)
    if there is not None:
        return there
    first: str | int | torch.device
    first = model.device if not hasattr(model, "hf_device_map") else list(model.hf_device_map.values())[0]
    return first


def where(model: Any) -> dict[str, torch.device]:
    """Return the devices of the modules that peft put on ``model``, and for "" the one that offloaded modules run on."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    there = offloaded_modules.first_execution_device(model)
    if there is None:
        return getattr(model, "hf_device_map", {"": model.device})
    found = {"": there}
    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            found.update((name, p.device) for p in module.parameters() if not p.is_meta)
    return found


def defect_peftmodel() -> Finding:
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


def defect_load_adapter_of_transformers_4() -> Finding:
    """Load an adapter into a tiny Llama that has its embedding on disk."""
    import tempfile

    import torch
    from accelerate import disk_offload
    from safetensors import SafetensorError

    with tempfile.TemporaryDirectory() as adapter, tempfile.TemporaryDirectory() as folder:
        _save_adapter(adapter)
        base = _llama()
        resident = dict.fromkeys(("model.layers", "model.norm", "lm_head"), "cpu")
        base.hf_device_map = {"model.embed_tokens": "disk", **resident}
        disk_offload(base.model.embed_tokens, folder, execution_device=torch.device("cpu"))
        try:
            base.load_adapter(adapter)
        except SafetensorError as error:
            return Finding(True, f"SafetensorError: {error}")
        return Finding(not offloaded_modules.is_offloaded(base), "the adapter is loaded")


def defect_load_adapter_of_transformers_5() -> Finding:
    """Load an adapter into a tiny Llama on disk, and compare with the same in memory."""
    import tempfile

    import torch
    from accelerate import disk_offload

    with tempfile.TemporaryDirectory() as adapter, tempfile.TemporaryDirectory() as folder, torch.no_grad():
        _save_adapter(adapter)
        whole, offloaded_model = _llama(), _llama()
        offloaded_model.hf_device_map = {"": "disk"}
        disk_offload(offloaded_model, folder, execution_device=torch.device("cpu"))
        ids = torch.arange(8)[None]
        for loaded in (whole, offloaded_model):
            try:
                loaded.load_adapter(adapter)
            except ImportError as why:
                raise CannotShow(f"load_adapter of this transformers needs another peft: {why.msg}") from why
        error = relative_error(offloaded_model(ids).logits, whole(ids).logits)
    return Finding(not error < 1e-6, f"relative error of the output {error:.1e}")


def _llama() -> Any:
    """Return a tiny Llama, each time with the same values."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=8, num_key_value_heads=2, **size)).eval()


def _save_adapter(folder: str) -> None:
    """Save an adapter for the tiny Llama, which changes its outputs."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(_llama(), config).save_pretrained(folder)


_PEFT_MODEL = "peft.peft_model:PeftModel"
_HAS_MAP = 'getattr({}, "hf_device_map", None) is not None'
_LOAD_ADAPTER = "transformers.integrations.peft:PeftAdapterMixin.load_adapter"


def _dispatch_unless_offloaded(function: str, model: str, has_map: str = _HAS_MAP) -> Rewrite:
    """Return the edit of a function of peft that dispatches ``model`` if it has a device map."""
    has_map = has_map.format(model)
    return Rewrite(
        function,
        find=has_map,
        replace=f"{has_map} and not _patches_stays({model}, kwargs)",
        names={"_patches_stays": stays},
    )


PATCH = Patch(
    id="peft-load-adapter-offloaded",
    summary="loading an adapter dispatches an offloaded model again, fails, or silently leaves adapters at random values",
    groups=("offload", "save"),
    silent=True,
    messages=(
        Message("Cannot copy out of meta tensor; no data!", "torch/lib/libtorch_cpu.so"),
        Message(
            "SafetensorError: device disk is invalid",
            "safetensors/_safetensors_rust.abi3.so",
            parts=("device disk is invalid",),
            holds=(" is invalid",),
        ),
    ),
    links=(
        "https://github.com/huggingface/peft/issues/2541",
        "https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/integrations/peft.py#L193",
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/peft.py#L296",
    ),
    why="""
        If the device map of a model names the CPU or the disk, ``PeftModel.from_pretrained`` removes accelerate's
        hooks. ``load_adapter`` then infers a device map from the memory that it finds, and dispatches the whole
        model with it:

        - What was on disk has no hook in between, and the inferred map may be a single device: ``Cannot copy out of
          meta tensor; no data!``.
        - What was in CPU memory is moved to the device if it has room at the moment. The user's device map is lost.
        - Or the adapters are offloaded too, and nothing is trained.
        - A folder that accelerate wrote (``dispatch_model``, ``disk_offload``) has no ``safetensors_file``:
          ``KeyError``.
        - ``AutoPeftModel.from_pretrained(..., device_map=...)`` loads the base model by that map and dispatches it
          again by the same map, whose names the model under the adapter no longer has: ``KeyError``, or a weight on
          meta without a value.
        - ``load_adapter`` alone, which the Trainer calls to resume and to load the best model, dispatches a model
          that still has its hooks.

        All releases.

        ``model.load_adapter`` of transformers 4.53 to 4.57 reads the file of the adapter to the first device of the
        model's device map. If that is "disk", it raises ``SafetensorError: device disk is invalid``. If it is a
        device, the whole model, with hooks and adapters, is dispatched again by a map that is inferred from free
        memory, as above.

        Since transformers 5.4 ``model.load_adapter`` loads the tensors of an adapter by the device map of the
        model. If the map has a layer on the disk, the tensor counts as offloaded and is not loaded: the adapter
        silently keeps its random initial values. If the map has a layer on the CPU, the tensor goes there, although
        the layer runs on the device.
    """,
    repair="""
        With the repair an offloaded model stays dispatched as it is, and the adapters are loaded to the device
        where their layers run (``peft-adapters-on-meta``). If you pass a ``device_map`` or ``max_memory`` to
        ``PeftModel.from_pretrained`` or ``load_adapter``, the model is dispatched with it, as before. A model
        without offload hooks is read and dispatched by its device map, as before.
    """,
    former_ids=(
        "peft-load-adapter-dispatches-again",
        "transformers-load-adapter-dispatches-again",
        "transformers-load-adapter-offloaded",
    ),
    parts=(
        Part(
            "PeftModel",
            ("peft>=0.14", "accelerate>=0.26.1"),
            "0.21.2",
            (
                _dispatch_unless_offloaded(f"{_PEFT_MODEL}.from_pretrained", "model", 'hasattr({}, "hf_device_map")'),
                _dispatch_unless_offloaded(f"{_PEFT_MODEL}.from_pretrained", "model"),
                _dispatch_unless_offloaded(f"{_PEFT_MODEL}.load_adapter", "self"),
                Rewrite.to_call(
                    "peft.auto:_BaseAutoPeftModel.from_pretrained",
                    "cls._target_peft_class.from_pretrained",
                    on_base,
                    "cls._target_peft_class.from_pretrained, base_model",
                ),
                _dispatch_unless_offloaded("peft.mixed_model:PeftMixedModel.from_pretrained", "model"),
            ),
            defect_peftmodel,
        ),
        Part(
            "load_adapter of transformers 4",
            ("transformers>=4.53,<5", "peft>=0.14", "accelerate>=0.26.1"),
            "4.57.6",
            (
                Rewrite(
                    _LOAD_ADAPTER,
                    find=_HAS_MAP.format("self"),
                    replace=f"{_HAS_MAP.format('self')} and not _patches_offloaded(self)",
                    names={"_patches_offloaded": offloaded_modules.is_offloaded},
                ),
                Rewrite.to_call(
                    _LOAD_ADAPTER,
                    'self.device if not hasattr(self, "hf_device_map") else list(self.hf_device_map.values())[0]',
                    device_of,
                    "self",
                ),
            ),
            defect_load_adapter_of_transformers_4,
        ),
        Part(
            "load_adapter of transformers 5",
            ("transformers>=5.4", "peft>=0.14", "accelerate>=0.26.1"),
            "5.24.0",
            (Rewrite.to_call(_LOAD_ADAPTER, 'getattr(self, "hf_device_map", {"": self.device})', where, "self"),),
            defect_load_adapter_of_transformers_5,
        ),
    ),
)
