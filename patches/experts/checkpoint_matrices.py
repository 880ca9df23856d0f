"""The matrices of one parameter of experts as a checkpoint has them: packed with their statistics, or in floating point."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes import functional

from . import int8_matrix
from .packed_experts import PackedExperts
from .quantize import QuantizationConfig
from .tensor import as_parameter

_TENSOR_STATISTICS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_SCALES = "SCB"
_INT8 = (_SCALES, "weight_format")  # named layer.SCB, not layer.weight.SCB
STATISTICS = (*_TENSOR_STATISTICS, *_STATES, *_INT8)


def statistic_name(weight: str, statistic: str) -> str:
    """Return the name of a statistic of ``weight`` in a checkpoint."""
    return weight.removesuffix("weight") + statistic if statistic in _INT8 else f"{weight}.{statistic}"


def read_matrices(source: str, tensors: dict[str, Any], target: Any) -> list[Any]:
    """Return for each expert its packed weight and `QuantState` or INT8 scales, or its matrix in floating point.

    ``tensors`` has a list over the experts for ``source``, the name of a weight, and for the name of each statistic. Raises `ValueError` if statistics are missing, or if the experts are quantized in different ways.
    """
    weights = tensors[source]
    named = {name: tensors.get(statistic_name(source, name)) for name in STATISTICS}
    statistics = {name: values for name, values in named.items() if values}
    packed = [i for i, weight in enumerate(weights) if _is_packed(weight, target)]
    counts = {name: len(values) for name, values in statistics.items()}
    states = [name for name in _STATES if name in statistics]
    if int8 := bool(statistics.keys() & {*_INT8}):
        found_counts = {_SCALES: counts.get(_SCALES, 0)}
        mixed = bool(statistics.keys() - {*_INT8})
    else:
        found_counts = {name: counts.get(name, 0) for name in ("absmax", "quant_map")}
        found_counts["quant_state"] = sum(counts[name] for name in states)
        nested = {count for name, count in counts.items() if name.startswith("nested")}
        mixed = len(states) > 1 or bool(nested - {len(packed)})
    for name, count in found_counts.items():
        if count != len(packed):
            raise ValueError(
                f"{source}: {len(packed)} experts are packed, but {count} have {name}. Download or save the checkpoint again."
            )
    if mixed:
        raise ValueError(
            f"{source}: the experts of one parameter are quantized in different ways: the checkpoint has "
            f"{', '.join(sorted(statistics))}. Quantize the original model again."
        )
    if any(int(form) for form in statistics.get("weight_format", ())):
        raise ValueError(
            f"{source}: INT8 weights in a GPU layout (weight_format), which only bitsandbytes before 0.37 wrote: quantize the "
            "original model again"
        )
    result = list(weights)
    for position, expert in enumerate(packed):
        weight = weights[expert]
        if int8:
            result[expert] = (weight, statistics[_SCALES][position].float())
        else:
            entries = {f"weight.{name}": values[position] for name, values in statistics.items()}
            result[expert] = (weight, functional.QuantState.from_dict(entries, device=weight.device))
    return result


def _is_packed(weight: Any, target: Any) -> bool:
    return not weight.is_floating_point() or (weight.dim() == 2 and weight.shape[1] == 1 != target.shape[2])


def check_kinds(name: str, matrices: dict[str, list[Any]]) -> None:
    """Raise `ValueError` if the matrices of the parameter ``name``, by their sources, are quantized in different ways."""
    kinds = {source: _kind(group[0]) for source, group in matrices.items()}
    first = next(iter(kinds))
    for source, kind in kinds.items():
        if kind != kinds[first]:
            raise ValueError(
                f"{name}: the experts of one parameter are quantized in different ways: {first} is {kinds[first]}, {source} "
                f"is {kind}. Quantize the original model again."
            )


def _kind(matrix: tuple[Any, Any]) -> str:
    packed, state = matrix
    if packed.dtype == torch.int8:
        return "INT8"
    nested = f", double quantization in blocks of {state.state2.blocksize}" if state.nested else ""
    return f"{state.quant_type} in blocks of {state.blocksize}{nested}"


def make_parameter(
    name: str, matrices: list[list[Any]], target: Any, how: QuantizationConfig, transposed: bool = False
) -> Any:
    """Make the parameter of the experts' matrices, which it shows ``transposed`` if asked to.

    Raises `ValueError` if the matrices do not fit together, or do not fit ``target``.
    """
    stack = _stack_int8 if matrices[0][0][0].dtype == torch.int8 else _stack_4bit
    made = stack(name, matrices, target, how)
    count, rows, columns = made.shape
    shape = (count, columns, rows) if transposed else made.shape
    if shape != tuple(target.shape):
        raise ValueError(f"{name}: the checkpoint has shape {shape}, the model {tuple(target.shape)}")
    return as_parameter(made, target.dtype, transposed)


def _stack_int8(name: str, matrices: list[list[Any]], target: Any, how: QuantizationConfig) -> PackedExperts:
    for group in matrices:
        for number, (packed, scales) in enumerate(group):
            if packed.shape != group[0][0].shape or scales.shape != packed.shape[:1]:
                raise ValueError(
                    f"{name}: expert {number} has shape {tuple(packed.shape)} and scales of {tuple(scales.shape)}, expert 0 "
                    f"shape {tuple(group[0][0].shape)}"
                )
    return PackedExperts.from_scales(matrices, target.dtype, how.threshold)


def _stack_4bit(name: str, matrices: list[list[Any]], target: Any, how: QuantizationConfig) -> PackedExperts:
    for group in matrices:
        first = group[0][1]
        for number, (packed, state) in enumerate(group):
            if (state.shape, state.blocksize) != (first.shape, first.blocksize):
                raise ValueError(
                    f"{name}: expert {number} has shape {tuple(state.shape)} and blocks of {state.blocksize}, expert 0 "
                    f"{tuple(first.shape)} and {first.blocksize}"
                )
            if packed.dtype != matrices[0][0][0].dtype:
                raise ValueError(
                    f"{name}: the packed weights of expert {number} are {packed.dtype}, those of expert 0 "
                    f"{matrices[0][0][0].dtype}"
                )
            _check_lengths(f"{name}: expert {number}", packed, state)
            _check_quant_maps(f"{name}: expert {number}", state, matrices[0][0][1])
            state.dtype = target.dtype  # as the patch transformers-quant-state-dtype does for linear layers
    return PackedExperts.from_states(matrices)


def _check_lengths(what: str, packed: Any, state: Any) -> None:
    """Raise `ValueError` if tensors of a matrix are not as long as its shape asks for: a kernel would read beyond them."""
    values = state.shape.numel()
    blocks = -(-values // state.blocksize)
    if packed.nbytes != -(-values // 2):
        raise ValueError(
            f"{what} has shape {tuple(state.shape)}, but packed weights of {packed.nbytes} bytes: expected {-(-values // 2)}"
        )
    lengths = [("absmax", state.absmax.numel(), blocks)]
    if state.nested:
        nested = state.state2
        lengths.append(("nested_absmax", nested.absmax.numel(), -(-blocks // nested.blocksize)))
        lengths.append(("nested_quant_map", nested.code.numel(), 256))
    for part, got, expected in [*lengths, ("quant_map", state.code.numel(), 16)]:
        if got != expected:
            raise ValueError(f"{what} has shape {tuple(state.shape)}, but {part} of {got} values: expected {expected}")


def _check_quant_maps(what: str, state: Any, first: Any) -> None:
    """Raise `ValueError` if a quant_map of a matrix differs from the one of expert 0, which all experts share."""
    pairs = [("quant_map", state.code, first.code)]
    if state.nested:
        pairs.append(("nested_quant_map", state.state2.code, first.state2.code))
    for table, got, expected in pairs:
        if not torch.equal(got, expected):
            raise ValueError(f"{what} has another {table} than expert 0")


def to_dense_matrix(matrix: Any, dtype: Any) -> Any:
    """Return a matrix of :func:`read_matrices` in floating point."""
    if isinstance(matrix, tuple):
        packed, state = matrix
        int8 = packed.dtype == torch.int8
        matrix = (
            int8_matrix.dequantize_rows(packed, state, dtype) if int8 else functional.dequantize_4bit(packed, state)
        )
    return matrix.to(dtype)


def check_shapes(name: str, floating: dict[str, list[Any]]) -> None:
    """Raise ``ValueError`` if the matrices of one source have different shapes."""
    for source, group in floating.items():
        for number, matrix in enumerate(group):
            if matrix.shape != group[0].shape:
                raise ValueError(
                    f"{name}: expert {number} of {source} has shape {tuple(matrix.shape)}, expert 0 {tuple(group[0].shape)}"
                )
