"""BOFT, DeLoRA, FRoD, LoHa, LoKr, OSF, PSOFT, SHiRA, Super-Tuning and TinyLoRA fail on quantized layers, or use packed bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...adapters.base_weight import read_dense, refuse_if_packed
from ...engine import Finding, Message, Patch, Rewrite
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ...quantized.weights import dense_weight
from ..reproducers.adapted_layer import show_untrained_error

if TYPE_CHECKING:
    from torch import Tensor


def _stood_for(module: Any, weight: Tensor) -> Tensor:
    """Return the dequantized weight of ``module``, or ``weight``, which FRoD takes for it, if that is not quantized."""
    dense = dense_weight.dequantize_weight(module)
    return weight if dense is module.weight else dense


def _unpacked(layer: Any) -> Any:
    """Return ``layer``, or if its weight is packed, an ``nn.Linear`` with the dequantized weight."""
    if not dense_weight.describe_packing(layer):
        return layer
    from torch import nn

    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(dense_weight.dequantize_weight(layer).data, requires_grad=False)
    return linear


def _unless_trained(layer: Any) -> Any:
    remedy = "Name the norms of the model in target_modules"
    return refuse_if_packed(layer, "LNTuningConfig(target_modules=...)", remedy, "trains the weight of its layer")


def defect() -> Finding:
    """Compare the outputs of a 4-bit layer with and without LoHa before its first step, which changes nothing."""
    from peft import LoHaConfig

    return show_untrained_error(LoHaConfig(r=4, target_modules=["0"]), int8=False)


_BASE = "self.get_base_layer().weight"
_SHIRA = "peft>=0.17,<0.20"
_TOKENS = "trainable_tokens.layer:TrainableTokensLayer"


def _mask(method: str, layer: str) -> Rewrite:
    """Return the edit that gives an unpacked ``layer`` to the mask function of SHiRA, which may be the user's."""
    return Rewrite(
        f"peft.tuners.shira.model:ShiraModel.{method}",
        f"shira_config.mask_fn({layer}, shira_config.r, **kwargs)",
        f"shira_config.mask_fn(_patches_unpacked({layer}), shira_config.r, **kwargs)",
        names={"_patches_unpacked": _unpacked},
        when=_SHIRA,
    )


def _for_input(function: str, weight: str, layer: str, when: str) -> Rewrite:
    """Return the edit that casts ``weight``, made of the dequantized weight of ``layer``, to the dtype of the input."""
    return Rewrite(
        f"peft.tuners.{function}",
        weight,
        f"_patches_for_input({weight}, {layer}, x)",
        names={"_patches_for_input": dense_weight.dense_for_input},
        when=when,
    )


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
        raises an error that names the layer and says what to do, as for HRA and C3A (``packed_weights_as_values.py``).
    """,
    cost="""
        One dequantized weight for each layer while the adapter is made; BOFT, OFT, SHiRA, and FRoD with dropout
        need one in each forward.
    """,
    requires=("peft>=0.14", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=(
        read_dense("loha.layer:LoHaLayer.update_layer", "base_layer.weight.shape"),
        read_dense("loha.layer:LoHaLayer.get_delta_weight", "base_layer.weight.shape"),
        read_dense("lokr.layer:LoKrLayer.get_delta_weight", "base_layer.weight.shape", "peft>=0.18"),
        read_dense("lokr.layer:LoKrLayer.get_delta_weight", f"{_BASE}.shape", "peft<0.18"),
        dense_weight.refuse_merge("lycoris_utils:LycorisLayer.merge"),
        read_dense("delora.layer:DeloraLayer.reset_delora_parameters", _BASE, "peft>=0.18"),
        dense_weight.refuse_merge("delora.layer:DeloraLinear.merge", "peft>=0.18"),
        read_dense("tinylora.layer:TinyLoraLayer._init_svd", "base_layer.weight", "peft>=0.19"),
        read_dense("tinylora.model:TinyLoraModel._create_and_replace", "target.weight.dtype", "peft>=0.19"),
        dense_weight.refuse_merge("tinylora.layer:Linear.merge", "peft>=0.19"),
        Rewrite(
            "peft.tuners.frod.model:FrodModel._init_frod_projections",
            "weights[layer_idx][category] = weight",
            "weights[layer_idx][category] = _patches_stood_for(module, weight)",
            names={"_patches_stood_for": _stood_for},
            when="peft>=0.20",
        ),
        read_dense("frod.layer:FrodLayer.update_layer", "base_layer.weight", "peft>=0.20", count=3),
        read_dense("frod.layer:FrodLayer._get_base_weight_before_merge", _BASE, "peft>=0.21"),
        read_dense("frod.layer:Linear.get_delta_weight", _BASE, "peft>=0.20"),
        read_dense("frod.layer:Linear.forward", "base_layer.weight", "peft>=0.20"),
        dense_weight.refuse_merge("frod.layer:Linear.merge", "peft>=0.20"),
        Rewrite(
            "peft.tuners.osf.model:OSFModel._create_and_replace",
            "min(target.weight.shape)",
            "min(_patches_dense_shape(target))",
            names={"_patches_dense_shape": dense_weight.dense_shape},
            when="peft>=0.18",
        ),
        read_dense("osf.layer:OSFLayer.__init__", "base_layer.weight.shape", "peft>=0.18"),
        read_dense("osf.layer:OSFLayer.update_layer", "base_layer.weight", "peft>=0.18"),
        dense_weight.refuse_merge("osf.layer:OSFLayer.merge", "peft>=0.18"),
        read_dense("osf.model:OSFModel._cast_adapter_dtype", "base_layer.weight.dtype", "peft>=0.18,<0.19"),
        _for_input(
            "osf.layer:Linear.forward", "self._reconstruct_weight(active_adapter)", "base_layer", "peft>=0.18,<0.19"
        ),
        dense_weight.dequantize_in_forward("oft.layer:Linear.forward", "peft<0.16"),
        dense_weight.dequantize_in_forward("boft.layer:Linear.forward", "peft<0.20"),
        dense_weight.refuse_merge("boft.layer:Linear.merge", "peft<0.20"),
        read_dense("shira.layer:ShiraLayer.__init__", "base_layer.weight.shape", _SHIRA),
        read_dense("shira.layer:ShiraLayer.update_layer", "self.base_layer.weight.dtype", _SHIRA),
        _mask("_create_and_replace", "target.base_layer"),
        _mask("_create_new_module", "target_base_layer"),
        read_dense("shira.layer:Linear.forward", "self.base_layer.weight", _SHIRA, dtype="x.dtype"),
        dense_weight.refuse_merge("shira.layer:Linear.merge", _SHIRA),
        read_dense("psoft.layer:PsoftLayer._build_psoft_ab_cache_buffers", "base.weight", "peft>=0.19"),
        dense_weight.refuse_merge("psoft.layer:Linear.merge", "peft>=0.19"),
        read_dense("supertuning.layer:SupertuningLayer.update_layer", "base_layer.weight", "peft>=0.21"),
        read_dense("supertuning.layer:Linear.get_delta_weight", _BASE, "peft>=0.21"),
        read_dense("supertuning.layer:Linear.forward", "base_layer.weight", "peft>=0.21", dtype="x.dtype"),
        read_dense(f"{_TOKENS}.update_layer", _BASE, "peft>=0.16"),
        Rewrite(
            f"peft.tuners.{_TOKENS}.update_layer",
            "self.weight[self.token_indices[adapter_name]]",
            "weight[self.token_indices[adapter_name]]",
            when="peft>=0.16",
        ),
        read_dense(f"{_TOKENS}.get_merged_weights", "self.base_layer.weight", "peft>=0.16"),
        _for_input(
            f"{_TOKENS}.forward_adapters",
            "self.get_merged_weights(active_adapters)",
            "self.base_layer",
            "peft>=0.16",
        ),
        Rewrite(
            f"peft.tuners.{_TOKENS}.merge",
            "merged = self.base_layer.weight.data",
            "merged = _patches_unless_packed(self.base_layer, self).weight.data",
            names={"_patches_unless_packed": dense_weight.refuse_if_packed},
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
