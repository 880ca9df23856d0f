"""``autocast_adapter_dtype=False`` is ignored on quantized layers: the adapters are float32, and take twice the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ...quantized.weights import dense_weight
from ..reproducers.adapted_layer import quantized_layer

if TYPE_CHECKING:
    import torch


# cast their input to float32, or compute with a weight in float32, whatever dtype their adapter has
_COMPUTE_IN_FLOAT32 = ("peft.tuners.adalora.bnb", "peft.tuners.hira.bnb", "peft.tuners.frod")


def _cast(model: Any, adapter: str) -> None:
    """Cast ``adapter`` on the quantized layers of ``model`` to the dtype that it has on an ``nn.Linear`` in their place."""
    import torch
    from peft.tuners._buffer_dict import BufferDict
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch import nn

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    of_model = None
    for layer in layers:
        base = layer.get_base_layer()
        if not dense_weight.describe_packing(base):
            continue
        dtype = _dtype_of(base)
        if dtype is None:
            dtype = of_model = of_model or _first_dtype(model, layers)
        if dtype is None or (dtype != torch.float32 and type(layer).__module__.startswith(_COMPUTE_IN_FLOAT32)):
            continue
        for container in layer.modules():
            if not isinstance(container, (nn.ModuleDict, nn.ParameterDict, BufferDict)) or adapter not in container:
                continue
            item: Any = container[adapter]
            if isinstance(item, nn.Module):
                item.to(dtype)  # leaves integers
            elif not item.is_floating_point() or item.dtype == dtype:
                continue
            elif isinstance(item, nn.Parameter):
                item.data = item.data.to(dtype)
            else:
                container[adapter] = item.to(dtype)


def _dtype_of(layer: Any) -> torch.dtype | None:
    """Return the dtype that a packed ``layer`` itself tells: its compute dtype, or the dtype of its bias."""
    dtype: torch.dtype | None = getattr(layer, "compute_dtype", None)
    if dtype is None and getattr(layer, "bias", None) is not None:
        dtype = layer.bias.dtype
    return dtype


def _first_dtype(model: Any, layers: list[Any]) -> torch.dtype | None:
    """Return the dtype of the first floating-point parameter of ``model`` that is neither packed nor an adapter's."""
    packed = {id(module.weight) for module in model.modules() if dense_weight.describe_packing(module)}
    bases = {id(parameter) for layer in layers for parameter in layer.get_base_layer().parameters()}
    adapters = {id(parameter) for layer in layers for parameter in layer.parameters()} - bases
    left = (parameter for parameter in model.parameters() if id(parameter) not in packed | adapters)
    return next((parameter.dtype for parameter in left if parameter.is_floating_point()), None)


def defect() -> Finding:
    """Put an adapter on an INT8 layer of a bfloat16 model, and ask for the dtype of the model."""
    import torch
    from peft import LoraConfig, get_peft_model

    norm = torch.nn.LayerNorm(64, dtype=torch.bfloat16)
    base = torch.nn.Sequential(norm, quantized_layer(int8=True, bias=False))
    model = get_peft_model(base, LoraConfig(target_modules=["1"]), autocast_adapter_dtype=False)
    found = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    return Finding("float32" in found, f"adapter of a bfloat16 model with INT8 layers: {', '.join(sorted(found))}")


def _edit(target: str, model: str, when: str) -> Rewrite:
    return Rewrite(
        f"peft.tuners.tuners_utils:{target}",
        find="""
            if not autocast_adapter_dtype:
                return
        """,
        replace=f"""
            if not autocast_adapter_dtype:
                _patches_cast_adapter({model}, adapter_name)
                return
        """,
        names={"_patches_cast_adapter": _cast},
        when=when,
    )


PATCH = Patch(
    id="peft-autocast-adapter-dtype",
    summary="autocast_adapter_dtype=False is ignored on quantized layers: adapters are float32, twice as large",
    groups=("train",),
    silent=True,
    links=("https://github.com/huggingface/peft/issues/2889", "https://github.com/huggingface/peft/pull/2893"),
    why="""
        peft makes an adapter in float32 and casts it to the dtype of the base weight. By default it then casts it
        back to float32. With ``autocast_adapter_dtype=False`` it does not, so an adapter on a 16-bit ``nn.Linear``
        has 16 bits. A packed weight has an integer dtype, to which peft casts no adapter:

        - on INT8 layers every adapter stays float32, in each release. peft #2893 left that open: "they don't have a
          compute dtype".
        - on 4-bit layers adapters stay float32 before peft 0.18. Since then they have the compute dtype, except the
          magnitude of DoRA: it has the dtype that the weight had before it was quantized.

        Reported as peft #2889. There is no message.
    """,
    repair="""
        The repair casts the adapters of quantized layers, where a user passes ``False``: on 4-bit layers to the
        compute dtype, on INT8 layers to the dtype of the bias, or without a bias to the dtype of the first
        floating-point parameter of the model. After ``prepare_model_for_kbit_training`` that is float32. Adapters
        of unquantized layers, and all with the default ``True``, stay as they were. So do the adapters of AdaLoRA,
        HiRA and FRoD on quantized layers of 16-bit models, which compute in float32.

        A second load of such an adapter gives it the dtype that is asked for then; the saved tensors have the dtype
        of the adapter.
    """,
    requires=("peft>=0.14", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=(
        _edit("BaseTuner._cast_adapter_dtype", "self.model", "peft<0.18"),
        _edit("cast_adapter_dtype", "model", "peft>=0.18"),
        *KEEP_PACKED_WEIGHT_BEFORE_048,  # get_peft_model moves the layer
    ),
    defect=defect,
)
