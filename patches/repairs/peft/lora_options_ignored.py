"""LoRA options that quantized layers ignore, or compute from packed weights: another adapter is trained than was asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ...adapters import base_weight
from ...engine import Finding, Patch, Rewrite
from ...engine.gate import satisfied
from ...process import call_stack
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048


def _variant(tuner: Any, config: Any) -> Any:
    """Return the variant that ``config`` asks for: on a quantized layer the one that ``nn.Linear`` gets."""
    if type(tuner).__module__ != "peft.tuners.lora.bnb":
        return tuner.resolve_lora_variant(config=config)
    from peft.tuners.lora.layer import Linear

    variants: Any = vars(Linear).get("lora_variants", property(lambda _: None))  # since peft 0.20
    asked: Any = SimpleNamespace(lora_variants=variants.fget(tuner))
    return Linear.resolve_lora_variant(asked, config=config)


_INITIALIZE_UNQUANTIZED = (
    "Make the adapter on the model loaded without quantization_config, save it with "
    "save_pretrained(folder, path_initial_model_for_weight_conversion=...), and load that onto the quantized model"
)
_INITIALIZE_LOFTQ_LATER = (
    "Leave the option out, and call peft.replace_lora_weights_loftq(model) after get_peft_model; or make the adapter on the "
    "model loaded without quantization_config, and save it with init_lora_weights=True in its configuration"
)


def _unless_kasa(layer: Any) -> Any:
    remedy = "Load the model without quantization_config, or leave the option out"
    return base_weight.refuse_if_packed(layer, "LoraConfig(kasa_config=...)", remedy)


def _unless_initialized(layer: Any, method: str) -> Any:
    remedy = _INITIALIZE_LOFTQ_LATER if method == "loftq" else _INITIALIZE_UNQUANTIZED
    return base_weight.refuse_if_packed(layer, f"LoraConfig(init_lora_weights={method!r})", remedy)


def defect() -> Finding:
    """Put LoRA with orthogonal factors on a 4-bit layer, since peft 0.19 one that is stored in bfloat16; PiSSA before 0.16."""
    import bitsandbytes as bnb
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    storage = torch.bfloat16 if satisfied("peft>=0.19") else torch.uint8
    options: dict[str, Any] = {"compute_dtype": torch.float32, "quant_type": "nf4", "quant_storage": storage}
    base = torch.nn.Sequential(bnb.nn.Linear4bit(64, 64, bias=False, **options)).to("cpu")
    method = "orthogonal" if satisfied("peft>=0.16") else "pissa"
    try:
        peft = get_peft_model(base, LoraConfig(r=4, target_modules=["0"], init_lora_weights=method))
    except (RuntimeError, TypeError, ValueError) as error:
        return Finding("Linear4bit" not in str(error), f"{method} on a 4-bit layer: {error}")
    tuned: Any = peft.base_model.model[0]
    product = (tuned.lora_B["default"].weight @ tuned.lora_A["default"].weight).abs().max().item()
    return Finding(product > 1e-6, f"orthogonal factors on a 4-bit layer: a product of {product:.1e}, 0 was asked for")


_LAYER, _VARIANTS = "peft.tuners.lora.layer:LoraLayer", "peft.tuners.lora.variants"
_DTYPE = {"_patches_adapter_dtype": base_weight.adapter_dtype}


def _dtype_of_base(function: str, when: str, count: int = 1) -> Rewrite:
    find, replace = "base_layer.weight.dtype", "_patches_adapter_dtype(module)"
    return Rewrite(f"{_VARIANTS}:{function}", find, replace, count=count, names=_DTYPE, when=when)


def _refuse(function: str, statement: str, method: str, when: str = "") -> Rewrite:
    """Return the edit of an initialization that replaces the base weight. ``{}`` stands in ``statement`` for its base layer."""
    layer = "base_layer" if function == "lora_ga_init" else "self.get_base_layer()"
    return Rewrite(
        f"{_LAYER}.{function}",
        find=statement.format(layer),
        replace=statement.format(f"_patches_unless_initialized({layer}, {method})"),
        names={"_patches_unless_initialized": _unless_initialized},
        when=when,
    )


PATCH = Patch(
    id="peft-lora-options-ignored",
    summary="LoRA variants and initializations are ignored on quantized layers, or computed from packed weights",
    groups=("train",),
    silent=True,
    links=(
        "https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/bnb.py",
        "https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/layer.py",
    ),
    why="""
        peft has LoRA layers of its own for models with ``is_loaded_in_4bit`` or ``is_loaded_in_8bit``. They know
        DoRA, aLoRA and Arrow, and no other variant:

        - ``monteclora_config``, ``use_bdlora`` and ``kasa_config`` are ignored, and there is no message: plain LoRA
          is trained and saved, under a configuration that names the other method. ``use_bdlora`` since peft 0.19,
          ``monteclora_config`` since 0.20, ``kasa_config`` since 0.21.
        - ``velora_config`` raises ``Linear4bit does not support VeLoRA`` (0.20), although it changes nothing about
          the base weight.
        - Two variants at once raise an error on ``nn.Linear`` (0.20). On a quantized layer one of them is ignored.

        Two initializations take the dtype or the values of the packed weight instead of the weight's:

        - ``init_lora_weights="orthogonal"`` casts the adapter to the dtype of the packed weight: ``Only Tensors of
          floating point and complex dtype can require gradients``. With ``bnb_4bit_quant_storage=torch.bfloat16``
          there is no error: a float32 adapter is rounded to bfloat16, and its product is 1.5e-4 at the start where
          it should be 9e-9. Since peft 0.16.
        - ``init_lora_weights="mica"`` needs the singular vectors of the weight: ``Please initialize MiCA under
          float32, float16, or bfloat16``. Since 0.20.

        PiSSA, CorDA, LoftQ and LoRA-GA replace the base weight when they start. On packed weights they raise errors
        that name no layer (``Please initialize PiSSA under float32``; ``data set to a tensor that requires
        gradients must be floating point``), or with ``bnb_4bit_quant_storage=torch.bfloat16`` factor packed bits.
        (OLoRA quantizes the new weight again, by design.)
    """,
    repair="""
        The repair gives a quantized layer the variant that ``nn.Linear`` gets, with the name of the layer, which
        BD-LoRA needs. Values that are computed from the weight are computed from the dequantized weight, and an
        adapter has the dtype in which the layer computes. KaSA, PiSSA, CorDA, LoftQ and LoRA-GA raise an error that
        names the option and the layer and says what works, because quantizing the weight that they make again would
        undo it. Unquantized layers give the same parameters as before, bit for bit.

        An adapter that was trained as plain LoRA under such a configuration has no weights of the variant. With
        MonteCLoRA it loads as before, with a warning of missing keys; with BD-LoRA and KaSA loading it raises an
        error. Remove the option from its ``adapter_config.json`` to load it as the plain LoRA that it is.
    """,
    requires=("peft>=0.14", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=(
        Rewrite.to_call(
            f"{_LAYER}.update_layer",
            "self.resolve_lora_variant(config=config)",
            _variant,
            "self, config",
            when="peft>=0.19",
        ),
        Rewrite(
            f"{_LAYER}.update_layer",
            find='kwargs.get("target_name", "")',
            replace='kwargs.get("target_name") or _patches_target_name()',
            names={"_patches_target_name": call_stack.target_name},  # which layers for packed weights do not pass on
            when="peft>=0.19",
        ),
        Rewrite(
            f"{_LAYER}.orthogonal_init",
            find="self.get_base_layer().weight.dtype",
            replace="_patches_adapter_dtype(self)",
            names=_DTYPE,
            when="peft>=0.16",
        ),
        _refuse("pissa_init", "weight = {}.weight", "init_lora_weights"),
        _refuse("corda_init", "linear = {}", "init_lora_weights", "peft>=0.15"),
        _refuse("loftq_init", "weight = {}.weight", "'loftq'"),
        _refuse("lora_ga_init", "grad = {}._peft_loraga_grad", "'lora_ga'", "peft>=0.19"),
        Rewrite(
            "peft.tuners.lora.loraga:preprocess_loraga",
            find='hasattr(module, "quant_state")',
            replace="hasattr(_patches_unless_initialized(module, 'lora_ga'), 'quant_state')",
            names={"_patches_unless_initialized": _unless_initialized},
            when="peft>=0.19",
        ),
        base_weight.read_dense("lora.layer:LoraLayer.mica_init", "self.get_base_layer().weight", "peft>=0.20"),
        _dtype_of_base("BdLoraLinearVariant.init", "peft>=0.19", count=2),
        _dtype_of_base("BdLoraLinearVariant._get_bdlora_delta_weight", "peft>=0.19"),
        _dtype_of_base("VeloraLinearVariant.init", "peft>=0.20"),
        Rewrite.to_call(
            f"{_VARIANTS}:KasaLinearVariant._truncate_base_weight",
            "module.get_base_layer()",
            _unless_kasa,
            "module.get_base_layer()",
            when="peft>=0.21",
        ),
        *KEEP_PACKED_WEIGHT_BEFORE_048,  # get_peft_model moves the layer
    ),
    defect=defect,
)
