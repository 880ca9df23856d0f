"""No adapter can be put on a tied head that is a 4-bit layer: ``'Parameter' object has no attribute 'compress_statistics'``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...adapters import merge_snapshot
from ...engine import CannotShow, Finding, Message, Patch, Rewrite
from ...quantized.weights import dequantized_in_place


def _is_floats(target: Any) -> bool:
    """Tell whether ``target``, or the layer that an adapter on it wraps, is a quantized layer by its class alone."""
    base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
    return dequantized_in_place.was_never_quantized(base)


def _to_merge(layer: Any, names: list[str]) -> list[str]:
    """Return ``names``, the adapters to merge into the base of ``layer``; raise if that would write into an embedding."""
    if not layer._get_available_adapters().isdisjoint(names):
        merge_snapshot.refuse_if_never_quantized(layer.get_base_layer())
    return names


def defect() -> Finding:
    """Put LoRA on the head of a model of one's own, tied to its embedding."""
    import bitsandbytes as bnb
    import torch
    from peft import LoraConfig, get_peft_model

    model: Any = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(32, 64)})
    model["head"] = bnb.nn.Linear4bit(64, 32, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    model["head"].weight = model["embedding"].weight
    model.is_loaded_in_4bit = True
    lora = LoraConfig(r=4, target_modules=["head"])
    try:
        get_peft_model(torch.nn.ModuleDict({"head": torch.nn.Linear(64, 32)}), lora)
    except ImportError as error:
        raise CannotShow(
            f"this peft refuses every layer, because it does not support the installed torchao: {error}"
        ) from error
    try:
        head = get_peft_model(model, lora).base_model.model["head"]
    except AttributeError as error:
        return Finding(True, f"LoRA on a tied 4-bit head: {error}")
    return Finding(not hasattr(head, "lora_A"), "LoRA is on the tied 4-bit head")


# tuners that ask whether the model is quantized, and the releases in which they do
_TUNERS = {
    "adalora.model:AdaLoraModel": "",
    "hira.model:HiraModel": "peft>=0.20",
    "ia3.model:IA3Model": "",
    "lora.model:LoraModel": "",
    "oft.model:OFTModel": "peft>=0.16,<0.21",
    "pvera.model:PveraModel": "peft>=0.19",
    "randlora.model:RandLoraModel": "peft>=0.16",
    "road.model:RoadModel": "peft>=0.18",
    "vera.model:VeraModel": "peft<0.20",
}


def _edits() -> Iterator[Rewrite]:
    for tuner, when in _TUNERS.items():
        for bits in ("8bit", "4bit"):
            asked = f'getattr(self.model, "is_loaded_in_{bits}", False)'
            yield Rewrite(
                f"peft.tuners.{tuner}._create_and_replace",
                find=asked,
                replace=f"({asked} and not _patches_is_floats(target))",
                names={"_patches_is_floats": _is_floats},
                when=when,
            )
    yield Rewrite(
        "peft.tuners.tuners_utils:check_adapters_to_merge",
        find="return adapter_names",
        replace="return _patches_to_merge(module, adapter_names)",
        names={"_patches_to_merge": _to_merge},
    )


PATCH = Patch(
    id="peft-tied-quantized-head",
    summary="adapters on a tied 4-bit head raise AttributeError: 'Parameter' has no 'compress_statistics'",
    groups=("layers", "train"),
    messages=(
        Message(
            "'Parameter' object has no attribute 'compress_statistics'",
            "peft/tuners/ia3/model.py",
            parts=("object has no attribute 'compress_statistics'",),
            holds=(".weight.compress_statistics",),
        ),
    ),
    links=(
        "https://github.com/huggingface/transformers/issues/45674",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1634",
    ),
    why="""
        A head whose weight is tied to the embedding is a ``Linear4bit`` or ``Linear8bitLt`` by its class alone: its
        weight is the floating-point ``Parameter`` of the embedding. Loading with a list of modules to skip makes one
        (``transformers-tied-head-quantized``), accelerate's ``load_and_quantize_model`` with ``skip_modules`` does, and
        so does a user's own model with ``self.head.weight = self.embedding.weight``. Such a layer computes
        (``bitsandbytes-int8-plain-weight``, ``bitsandbytes-linear4bit-plain-weight``), but peft goes by the class:
        LoRA, DoRA, IA3, AdaLoRA, RandLoRA, PVeRA, RoAd, HiRA, and VeRA and OFT of older peft, ask a 4-bit weight for
        ``compress_statistics``, and HiRA an INT8 weight for ``SCB``. All releases of peft.
    """,
    repair="""
        The repair lets these tuners adapt such a layer as the ``nn.Linear`` that it is. Each tuner of peft asks in one
        place, in a module that ``import peft`` imports, whether the model is loaded in 4 bits or INT8. For such a layer
        the answer is now no. All other layers get the same adapter as before.

        A merge into such a layer still raises an error, because it would write into the embedding too. The error now
        names the layer and the remedy. It was an ``AttributeError``, and for IA3 and AdaLoRA a ``NotImplementedError``
        without a message.
    """,
    requires=("peft>=0.14", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=tuple(_edits()),
    defect=defect,
)
