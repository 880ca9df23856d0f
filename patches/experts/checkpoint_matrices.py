"""The matrices of one parameter of experts as a checkpoint has them: packed with their statistics, or in floating point."""

from __future__ import annotations

from typing import Any

import torch

from . import int8_matrix
from .packed_experts import PackedExperts
from .quantize import QuantizationConfig
from .tensor import as_parameter

STATISTICS = (
    "absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4",
    "quant_state.bitsandbytes__fp4",
)  # fmt: skip
SCALES = "SCB"
INT8 = (SCALES, "weight_format")
"""Beside the weight, and not below it."""


def statistic_name(weight: str, statistic: str) -> str:
    """The name of a statistic of ``weight``."""
    return weight.removesuffix("weight") + statistic if statistic in INT8 else f"{weight}.{statistic}"


def read_matrices(source: str, tensors: dict[str, Any], target: Any) -> list[Any]:
    """Each expert's matrix of ``source``: packed weights with their state or scales, or floating point."""
    from bitsandbytes.functional import QuantState

    weights = tensors[source]
    every = (*STATISTICS, *INT8)
    statistics = {n: tensors[statistic_name(source, n)] for n in every if tensors.get(statistic_name(source, n))}
    packed = [i for i, weight in enumerate(weights) if _is_packed(weight, target)]
    if statistics.keys() & set(INT8):
        return _int8_matrices(source, weights, statistics, packed)
    maps = sum(len(statistics.get(name, ())) for name in STATISTICS if name.startswith("quant_state"))
    counts = {"absmax": len(statistics.get("absmax", ())), "quant_map": len(statistics.get("quant_map", ()))}
    for name, count in {**counts, "quant_state": maps}.items():
        if count != len(packed):
            raise ValueError(
                f"{source}: {len(packed)} experts are packed, but {count} have {name}. Download or save the checkpoint again."
            )
    kinds = [name for name in statistics if name.startswith("quant_state")]
    nested = {len(statistics[name]) for name in statistics if name.startswith("nested")}
    if len(kinds) > 1 or nested - {len(packed)}:
        raise ValueError(_different(source, statistics))
    result = list(weights)
    for position, expert in enumerate(packed):
        entries = {f"weight.{name}": values[position] for name, values in statistics.items()}
        result[expert] = (weights[expert], QuantState.from_dict(entries, device=weights[expert].device))
    return result


def _int8_matrices(source: str, weights: list[Any], statistics: dict[str, list[Any]], packed: list[int]) -> list[Any]:
    scales = statistics.get(SCALES, [])
    if len(scales) != len(packed):
        raise ValueError(
            f"{source}: {len(packed)} experts are packed, but {len(scales)} have SCB. Download or save the checkpoint again."
        )
    if statistics.keys() - set(INT8):
        raise ValueError(_different(source, statistics))
    if any(int(form) for form in statistics.get("weight_format", ())):
        raise ValueError(
            f"{source}: INT8 weights in a GPU layout (weight_format), which only bitsandbytes before 0.37 wrote: quantize the "
            "original model again"
        )
    result = list(weights)
    for position, expert in enumerate(packed):
        result[expert] = (weights[expert], scales[position].float())
    return result


def _different(source: str, statistics: dict[str, list[Any]]) -> str:
    return (
        f"{source}: the experts of one parameter are quantized in different ways: the checkpoint has "
        f"{', '.join(sorted(statistics))}. Quantize the original model again."
    )


def _is_packed(weight: Any, target: Any) -> bool:
    return not weight.is_floating_point() or (weight.dim() == 2 and weight.shape[1] == 1 != target.shape[2])


def check_kinds(name: str, matrices: dict[str, list[Any]]) -> None:
    """An error if the matrices of the parameter ``name``, by their sources, are not all quantized in the same way."""
    kinds = {source: _kind(group[0]) for source, group in matrices.items()}
    first = next(iter(kinds))
    for source, kind in kinds.items():
        if kind != kinds[first]:
            raise ValueError(
                f"{name}: the experts of one parameter are quantized in different ways: {first} is {kinds[first]}, {source} "
                f"is {kind}. Quantize the original model again."
            )


def _kind(matrix: tuple[Any, Any]) -> str:
    codes, state = matrix
    if codes.dtype == torch.int8:
        return "INT8"
    nested = f", double quantization in blocks of {state.state2.blocksize}" if state.nested else ""
    return f"{state.quant_type} in blocks of {state.blocksize}{nested}"


def make_parameter(
    name: str, matrices: list[list[Any]], target: Any, how: QuantizationConfig, swapped: bool = False
) -> Any:
    """The parameter, after a look whether it is one; ``swapped``: it shows each matrix transposed."""
    experts = _stacked_int8 if matrices[0][0][0].dtype == torch.int8 else _stacked
    made = experts(name, matrices, target, how)
    count, rows, columns = made.shape
    shape = (count, columns, rows) if swapped else made.shape
    if shape != tuple(target.shape):
        raise ValueError(f"{name}: the checkpoint has shape {shape}, the model {tuple(target.shape)}")
    return as_parameter(made, target.dtype, swapped)


def _stacked_int8(name: str, matrices: list[list[Any]], target: Any, how: QuantizationConfig) -> PackedExperts:
    for group in matrices:
        for number, (codes, scales) in enumerate(group):
            if codes.shape != group[0][0].shape or scales.shape != codes.shape[:1]:
                raise ValueError(
                    f"{name}: expert {number} has shape {tuple(codes.shape)} and scales of {tuple(scales.shape)}, expert 0 "
                    f"shape {tuple(group[0][0].shape)}"
                )
    return PackedExperts.from_scales(matrices, target.dtype, how.threshold)


def _stacked(name: str, matrices: list[list[Any]], target: Any, how: QuantizationConfig) -> PackedExperts:
    for group in matrices:
        first = group[0][1]
        for number, (codes, state) in enumerate(group):
            if (state.shape, state.blocksize) != (first.shape, first.blocksize):
                raise ValueError(
                    f"{name}: expert {number} has shape {tuple(state.shape)} and blocks of {state.blocksize}, expert 0 "
                    f"{tuple(first.shape)} and {first.blocksize}"
                )
            if codes.dtype != matrices[0][0][0].dtype:
                raise ValueError(
                    f"{name}: the packed weights of expert {number} are {codes.dtype}, those of expert 0 "
                    f"{matrices[0][0][0].dtype}"
                )
            _check_lengths(f"{name}: expert {number}", codes, state)
            _check_tables(f"{name}: expert {number}", state, matrices[0][0][1])
            state.dtype = target.dtype  # as transformers-quant-state-dtype for linear layers
    return PackedExperts.from_states(matrices)


def _check_lengths(what: str, codes: Any, state: Any) -> None:
    """An error if tensors of a matrix have other lengths than its shape asks for: a kernel would read beyond them."""
    values = state.shape.numel()
    blocks = -(-values // state.blocksize)
    lengths = [("packed weights", codes.nbytes, -(-values // 2)), ("absmax", state.absmax.numel(), blocks)]
    if state.nested:
        double = state.state2
        lengths.append(("nested_absmax", double.absmax.numel(), -(-blocks // double.blocksize)))
        lengths.append(("nested_quant_map", double.code.numel(), 256))
    for part, got, expected in [*lengths, ("quant_map", state.code.numel(), 16)]:
        if got != expected:
            raise ValueError(f"{what} has shape {tuple(state.shape)}, but {part} of {got} values: expected {expected}")


def _check_tables(what: str, state: Any, first: Any) -> None:
    """An error if a matrix is not read by the tables of the first, which all share."""
    pairs = [("quant_map", state.code, first.code)]
    if state.nested:
        pairs.append(("nested_quant_map", state.state2.code, first.state2.code))
    for table, got, expected in pairs:
        if not torch.equal(got, expected):
            raise ValueError(f"{what} has another {table} than expert 0")


def to_dense_matrix(matrix: Any, dtype: Any) -> Any:
    from bitsandbytes.functional import dequantize_4bit

    if isinstance(matrix, tuple):
        codes, state = matrix
        matrix = (
            int8_matrix.dequantize_rows(codes, state, dtype)
            if codes.dtype == torch.int8
            else dequantize_4bit(codes, state)
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
