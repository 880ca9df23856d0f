"""Quantizing experts: each matrix by itself, with the packed weights that ``quantize_4bit`` gives for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from bitsandbytes import functional

from ..config import skip_list
from ..process import malloc_trim
from . import int8_matrix
from .experts_in_model import (
    ExpertParameter,
    find_experts,
    find_row_concatenated_experts,
    matrices_per_expert,
    weight_converters,
)
from .packed_experts import PackedExperts


class QuantizationConfig(NamedTuple):
    """The part of a ``BitsAndBytesConfig`` about quantized weights.

    ``threshold`` is ``llm_int8_threshold``; None, also in 4 bits: products dequantize. ``blocksize`` is of 4-bit weights; None:
    the default of bitsandbytes.
    """

    quant_type: str
    double: bool
    storage: torch.dtype
    threshold: float | None = None
    blocksize: int | None = None

    @classmethod
    def from_packed(cls, packed: PackedExperts) -> QuantizationConfig:
        """Return how ``packed`` was quantized."""
        kind, storage = packed.kind, packed.parts[0].codes.dtype
        return cls(kind.quant_type, packed.nested_code is not None, storage, kind.threshold, kind.blocksize)

    @classmethod
    def from_config(cls, config: Any) -> QuantizationConfig:
        """Return how ``config`` quantizes; raise `ValueError` if it asks for neither 4 bits nor INT8."""
        if getattr(config, "load_in_8bit", False):
            if config.llm_int8_has_fp16_weight:
                raise ValueError(
                    "llm_int8_has_fp16_weight=True keeps weights in floating point and quantizes them in each forward, "
                    "which quantized experts do not support. Leave it out, or load the model in 4 bits."
                )
            return cls("int8", False, torch.int8, float(config.llm_int8_threshold))
        if not getattr(config, "load_in_4bit", False):
            raise ValueError(
                "experts are quantized to 4 bits or INT8: load the model with BitsAndBytesConfig(load_in_4bit=True) or "
                "BitsAndBytesConfig(load_in_8bit=True)"
            )
        return cls(config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant, config.bnb_4bit_quant_storage)

    def bytes_per_value(self, columns: int) -> float:
        """Return the bytes a value takes in a matrix with so many columns, statistics included."""
        if self.quant_type == "int8":
            return 1 + 4 / columns
        blocksize = self.blocksize or 64
        return 0.5 + (1 + 4 / 256 if self.double else 4) / blocksize

    def for_module(self, module: Any) -> QuantizationConfig:
        """Return how the experts in ``module`` are quantized.

        LLM.int8 needs matrices whose rows are output features. Unless transformers says that they are
        (``is_transposed=False``), the experts are stored in INT8 and dequantized for products (``threshold=None``).
        """
        return self if getattr(module, "is_transposed", True) is False else self._replace(threshold=None)


def split_and_quantize_experts(experts: Iterable[torch.Tensor], count: int, how: QuantizationConfig) -> PackedExperts:
    """Split each of ``experts`` (rows, columns) into ``count`` matrices of equal rows, and quantize each by itself."""
    return quantize_experts_by_matrix((expert.chunk(count) for expert in experts), how)


def quantize_experts_by_matrix(experts: Iterable[Sequence[torch.Tensor]], how: QuantizationConfig) -> PackedExperts:
    """Quantize each matrix of each expert by itself."""
    by_matrix: list[list[Any]] = []
    for matrices in experts:
        by_matrix = by_matrix or [[] for _ in matrices]
        for quantized, matrix in zip(by_matrix, matrices):
            quantized.append(_quantize(matrix.detach(), how))
            malloc_trim.trim_after_quantizing(quantized[-1][0])
            dtype = matrix.dtype
    if how.quant_type == "int8":
        return PackedExperts.from_scales(by_matrix, dtype, how.threshold)
    return PackedExperts.from_states(by_matrix)


def _quantize(matrix: torch.Tensor, how: QuantizationConfig) -> Any:
    """Return packed weights, and their quantization state or scales."""
    if how.quant_type == "int8":
        return int8_matrix.quantize_rows(matrix)
    options: dict[str, Any] = {} if how.blocksize is None else {"blocksize": how.blocksize}
    return functional.quantize_4bit(
        matrix.contiguous(),
        quant_type=how.quant_type,
        compress_statistics=how.double,
        quant_storage=how.storage,
        **options,
    )


def experts_to_quantize(model: Any) -> tuple[list[ExpertParameter], QuantizationConfig]:
    """Return the experts of a loaded model that its configuration asks to quantize, and how; raise an error if it cannot."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        raise ValueError(_reason_not_quantized(model))
    how = QuantizationConfig.from_config(quantizer.quantization_config)
    found = [one for one in find_experts(model) if is_to_be_quantized(one.full_name, quantizer)]
    if not found:
        raise ValueError(reason_for_none(model))
    for one in found:
        _check(one)
    return found, how


def reason_for_none(model: Any) -> str:
    """Say why no experts of ``model`` are quantized."""
    what = type(model).__name__
    if flat := [one.full_name for one in find_row_concatenated_experts(model)]:
        more = f" and {len(flat) - 1} more" if len(flat) > 1 else ""
        return (
            f"the experts of this {what} cannot be quantized and stay as they are: it keeps them in parameters of two "
            f"dimensions ({flat[0]}{more}), and only linear layers and parameters of three dimensions can be quantized"
        )
    return (
        f"this {what} has no experts to quantize: no module of experts has a 3-D parameter, or "
        "llm_int8_skip_modules names all of them"
    )


def _reason_not_quantized(model: Any) -> str:
    what = type(model).__name__
    modules = model.modules() if hasattr(model, "named_modules") and not isinstance(model, type) else ()
    if any(type(module).__name__ in ("Linear4bit", "Linear8bitLt") for module in modules):
        return (
            f"this {what} is a part of a quantized model, or wraps one: give quantize_experts the model that "
            "from_pretrained returned"
        )
    return (
        f"this {what} is not quantized: load it with quantization_config=BitsAndBytesConfig(load_in_4bit=True) or "
        "(load_in_8bit=True); its experts are quantized in the same way"
    )


def is_to_be_quantized(name: str, quantizer: Any) -> bool:
    """Tell whether neither ``llm_int8_skip_modules`` nor the quantizer's ``modules_to_not_convert`` skips ``name``.

    An entry of ``llm_int8_skip_modules`` skips each path that contains its components, as for linear layers
    (docs/from_pretrained.md); transformers compares the beginning and the end of the path alone.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    user_skip_list = quantizer.quantization_config.llm_int8_skip_modules or ()
    skip_list_of_quantizer = getattr(quantizer, "modules_to_not_convert", None)
    if any(skip_list.path_contains(name, skipped) for skipped in user_skip_list):
        return False
    return bool(should_convert_module(name, skip_list_of_quantizer))


def _check(one: ExpertParameter) -> None:
    parameter = one.parameter
    if parameter.is_meta:
        raise ValueError(
            f"{one.full_name} is on the meta device (offloaded, or not loaded): quantize the experts before the model "
            "is dispatched"
        )
    if parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{one.full_name} is {parameter.dtype}: expected float16, bfloat16 or float32")


def quantize_model(model: Any) -> list[str]:
    """Quantize the experts of a loaded model, all or none; return the names of the quantized ones."""
    from .tensor import QuantizedExperts, as_parameter

    found, how = experts_to_quantize(model)
    converters = weight_converters(model)
    new: dict[int, Any] = {}
    for one in found:
        parameter = one.parameter
        if id(parameter) not in new and not isinstance(parameter, QuantizedExperts):
            experts = split_and_quantize_experts(
                parameter.unbind(0), matrices_per_expert(one.full_name, converters), how.for_module(one.module)
            )
            new[id(parameter)] = as_parameter(experts, parameter.dtype)
    for one in found:
        if id(one.parameter) in new:
            one.module._parameters[one.name] = new[id(one.parameter)]
    return [one.full_name for one in found]
