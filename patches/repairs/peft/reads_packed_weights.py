"""BOFT, DeLoRA, FRoD, LoHa, LoKr, OSF, PSOFT, SHiRA, Super-Tuning and TinyLoRA fail on quantized layers, or use packed bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...adapters import base_weight
from ...engine import Finding, Message, Patch, Rewrite
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ...quantized.weights import dense_weight
from ..reproducers.adapted_layer import show_untrained_error

if TYPE_CHECKING:
    from torch import Tensor


def _stood_for(module: Any, weight: Tensor) -> Tensor:
    """The dequantized weight of ``module``; ``weight``, what FRoD takes for it, if that is not quantized."""
    dense = dense_weight.dequantize_weight(module)
    return weight if dense is module.weight else dense


def _unpacked(layer: Any) -> Any:
    """``layer``, or, if its weight is packed, an ``nn.Linear`` with the dequantized weight."""
    if not dense_weight.describe_packing(layer):
        return layer
    from torch import nn

    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(dense_weight.dequantize_weight(layer).data, requires_grad=False)
    return linear


def _unless_trained(layer: Any) -> Any:
    remedy = "Name the norms of the model in target_modules"
    return base_weight.refuse_if_packed(
        layer, "LNTuningConfig(target_modules=...)", remedy, "trains the weight of its layer"
    )


def defect() -> Finding:
    """Compare the outputs of a 4-bit layer with and without LoHa before its first step, which changes nothing."""
    from peft import LoHaConfig

    return show_untrained_error(LoHaConfig(r=4, target_modules=["0"]), int8=False)


_NAMES = {"_patches_dense_weight": dense_weight.dequantize_weight, "_patches_shape_of": dense_weight.dense_shape}
_BASE = "self.get_base_layer().weight"
_SHIRA = "peft>=0.17,<0.20"
_OSF = "peft>=0.18,<0.19"


def _dense(function: str, when: str, weight: str = "base_layer.weight", count: int = 1) -> Rewrite:
    replace = f"_patches_dense_weight({weight.removesuffix('.weight')})"
    return Rewrite(f"peft.tuners.{function}", weight, replace, count=count, names=_NAMES, when=when)


def _dtype(function: str, when: str, layer: str) -> Rewrite:
    return Rewrite(
        f"peft.tuners.{function}",
        f"{layer}.weight.dtype",
        f"_patches_dtype_of({layer})",
        names={"_patches_dtype_of": dense_weight.dense_dtype},
        when=when,
    )


def _mask(method: str, layer: str) -> Rewrite:
    """SHiRA gives its layer to the mask function, which may be the user's."""
    return Rewrite(
        f"peft.tuners.shira.model:ShiraModel.{method}",
        f"shira_config.mask_fn({layer}, shira_config.r, **kwargs)",
        f"shira_config.mask_fn(_patches_unpacked({layer}), shira_config.r, **kwargs)",
        names={"_patches_unpacked": _unpacked},
        when=_SHIRA,
    )


def _shape(function: str, when: str = "", layer: str = "base_layer") -> Rewrite:
    replace = f"_patches_shape_of({layer})"
    return Rewrite(f"peft.tuners.{function}", f"{layer}.weight.shape", replace, names=_NAMES, when=when)


PATCH = Patch(
    id="peft-reads-packed-weights",
    summary="BOFT, DeLoRA, FRoD, LoHa, LoKr, OSF, PSOFT, SHiRA and TinyLoRA fail on quantized layers, or use packed bits as values",
    groups=("layers", "train"),
    silent=True,
    messages=(
        Message(
            "linalg.vector_norm: Expected a floating point or complex tensor as input. Got Byte",
            "torch/lib/libtorch_cpu.so",
            parts=(": Expected a floating point or complex tensor as input. Got ",),
        ),
    ),
    links=(
        "https://github.com/huggingface/peft/blob/main/src/peft/tuners/delora/layer.py",
        "https://github.com/huggingface/peft/blob/main/src/peft/tuners/lycoris_utils.py",
    ),
    why="""
        These tuners of peft have no code for quantized layers and read ``base_layer.weight`` as if it held values:

        - DeLoRA scales its update by the norms of the columns of the weight: ``linalg.vector_norm: Expected a
          floating point``. If packed 4-bit weights are stored as floats (``bnb_4bit_quant_storage=torch.bfloat16``,
          needed for FSDP), there is no error: it computes the norm of packed bits, often NaN. Since peft 0.18.
        - TinyLoRA (0.19) and FRoD (0.20) factor the weight and make parameters in its dtype: ``Only Tensors of
          floating point and complex dtype can require gradients``.
        - LoHa and LoKr reshape their update to the shape of the weight, which in 4 bits is the shape of packed
          bytes: ``shape '[2048, 1]' is invalid for input of size 4096``. In INT8 they train correctly.
        - OSF (0.18) and PSOFT (0.19) factor the weight, and Super-Tuning (0.21) computes with it. They raise errors
          about a dtype that name no layer, or factor packed bits that are stored as floats.
        - BOFT before 0.20, and OFT before 0.16, rotate the weight in each forward: ``mat1 and mat2 shapes cannot be
          multiplied``.
        - SHiRA (0.17 to 0.19) adds to the weight where a mask says, and makes both in its shape: ``Only Tensors of
          floating point``, or ``The SHiRA indices and weights are not the same dimensions``. A mask function of the
          user's, which may choose by values, now gets an ``nn.Linear`` with the dequantized weight.
        - Trainable tokens of a quantized linear layer, and LN tuning if its ``target_modules`` name one: ``Only
          Tensors of floating point``; stored as floats, packed bits are trained.
    """,
    repair="""
        The repair gives them the dequantized weight, or its shape. LN tuning, which trains the weight itself,
        raises an error that names the layer. Quantized layers then equal the same adapter on the dequantized model.
        Unquantized layers give the same parameter as before.

        None of these tuners can merge into quantized layers: ``merge`` raises errors about a dtype or shape. It now
        raises an error that names the layer and says what to do, as for HRA and C3A (``codes_as_weights.py``).
    """,
    cost="""
        One dequantized weight for each layer while the adapter is made; BOFT, OFT, SHiRA, and FRoD with dropout
        need one in each forward.
    """,
    requires=("peft>=0.14", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=(
        _shape("loha.layer:LoHaLayer.update_layer"),
        _shape("loha.layer:LoHaLayer.get_delta_weight"),
        _shape("lokr.layer:LoKrLayer.get_delta_weight", "peft>=0.18"),
        _shape("lokr.layer:LoKrLayer.get_delta_weight", "peft<0.18", "self.get_base_layer()"),
        dense_weight.refuse_merge("lycoris_utils:LycorisLayer.merge"),
        _dense("delora.layer:DeloraLayer.reset_delora_parameters", "peft>=0.18", _BASE),
        dense_weight.refuse_merge("delora.layer:DeloraLinear.merge", "peft>=0.18"),
        _dense("tinylora.layer:TinyLoraLayer._init_svd", "peft>=0.19"),
        _dtype("tinylora.model:TinyLoraModel._create_and_replace", "peft>=0.19", "target"),
        dense_weight.refuse_merge("tinylora.layer:Linear.merge", "peft>=0.19"),
        Rewrite(
            "peft.tuners.frod.model:FrodModel._init_frod_projections",
            "weights[layer_idx][category] = weight",
            "weights[layer_idx][category] = _patches_stood_for(module, weight)",
            names={"_patches_stood_for": _stood_for},
            when="peft>=0.20",
        ),
        _dense("frod.layer:FrodLayer.update_layer", "peft>=0.20", count=3),
        _dense("frod.layer:FrodLayer._get_base_weight_before_merge", "peft>=0.21", _BASE),
        _dense("frod.layer:Linear.get_delta_weight", "peft>=0.20", _BASE),
        _dense("frod.layer:Linear.forward", "peft>=0.20"),
        dense_weight.refuse_merge("frod.layer:Linear.merge", "peft>=0.20"),
        Rewrite(
            "peft.tuners.osf.model:OSFModel._create_and_replace",
            "min(target.weight.shape)",
            "min(_patches_shape_of(target))",
            names=_NAMES,
            when="peft>=0.18",
        ),
        _shape("osf.layer:OSFLayer.__init__", "peft>=0.18"),
        _dense("osf.layer:OSFLayer.update_layer", "peft>=0.18"),
        dense_weight.refuse_merge("osf.layer:OSFLayer.merge", "peft>=0.18"),
        _dtype("osf.model:OSFModel._cast_adapter_dtype", _OSF, "base_layer"),
        Rewrite(
            "peft.tuners.osf.layer:Linear.forward",
            "self._reconstruct_weight(active_adapter)",
            "_patches_for_input(self._reconstruct_weight(active_adapter), base_layer, x)",
            names={"_patches_for_input": dense_weight.dense_for_input},
            when=_OSF,
        ),
        dense_weight.dequantize_in_forward("oft.layer:Linear.forward", "peft<0.16"),
        dense_weight.dequantize_in_forward("boft.layer:Linear.forward", "peft<0.20"),
        dense_weight.refuse_merge("boft.layer:Linear.merge", "peft<0.20"),
        _shape("shira.layer:ShiraLayer.__init__", _SHIRA),
        _dtype("shira.layer:ShiraLayer.update_layer", _SHIRA, "self.base_layer"),
        _mask("_create_and_replace", "target.base_layer"),
        _mask("_create_new_module", "target_base_layer"),
        Rewrite(
            "peft.tuners.shira.layer:Linear.forward",
            "copy.deepcopy(self.base_layer.weight.data)",
            "copy.deepcopy(_patches_dense_weight(self.base_layer, x.dtype).data)",
            names=_NAMES,
            when=_SHIRA,
        ),
        dense_weight.refuse_merge("shira.layer:Linear.merge", _SHIRA),
        _dense("psoft.layer:PsoftLayer._build_psoft_ab_cache_buffers", "peft>=0.19", "base.weight"),
        dense_weight.refuse_merge("psoft.layer:Linear.merge", "peft>=0.19"),
        _dense("supertuning.layer:SupertuningLayer.update_layer", "peft>=0.21"),
        _dense("supertuning.layer:Linear.get_delta_weight", "peft>=0.21", _BASE),
        Rewrite(
            "peft.tuners.supertuning.layer:Linear.forward",
            "base_layer.weight",
            "_patches_dense_weight(base_layer, x.dtype)",
            names=_NAMES,
            when="peft>=0.21",
        ),
        _dense("trainable_tokens.layer:TrainableTokensLayer.update_layer", "peft>=0.16", _BASE),
        Rewrite(
            "peft.tuners.trainable_tokens.layer:TrainableTokensLayer.update_layer",
            "self.weight[self.token_indices[adapter_name]]",
            "weight[self.token_indices[adapter_name]]",
            when="peft>=0.16",
        ),
        _dense(
            "trainable_tokens.layer:TrainableTokensLayer.get_merged_weights", "peft>=0.16", "self.base_layer.weight"
        ),
        Rewrite(
            "peft.tuners.trainable_tokens.layer:TrainableTokensLayer.forward_adapters",
            "self.get_merged_weights(active_adapters)",
            "_patches_for_input(self.get_merged_weights(active_adapters), self.base_layer, x)",
            names={"_patches_for_input": dense_weight.dense_for_input},
            when="peft>=0.16",
        ),
        Rewrite(
            "peft.tuners.trainable_tokens.layer:TrainableTokensLayer.merge",
            "merged = self.base_layer.weight.data",
            "merged = _patches_unless_codes(self.base_layer, self).weight.data",
            names={"_patches_unless_codes": dense_weight.refuse_if_packed},
            when="peft>=0.16",
        ),
        Rewrite(
            "peft.tuners.ln_tuning.layer:LNTuningLayer.__init__",
            find="self.base_layer = base_layer",
            replace="self.base_layer = _patches_unless_trained(base_layer)",
            names={"_patches_unless_trained": _unless_trained},
        ),
        *KEEP_PACKED_WEIGHT_BEFORE_048,  # get_peft_model moves the layer
    ),
    defect=defect,
)
