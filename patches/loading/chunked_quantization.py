"""Quantizing on a CPU a piece at a time, with the packed weights and statistics that the whole weight has.

bitsandbytes quantizes a weight in one step. On a CPU that takes, for each value, 20 bytes of memory in 4 bits (140 before
bitsandbytes 0.50) and 9 in INT8: for the largest matrix of a model, more than all that a map with the disk in it keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..offload.offload_map import OffloadMap

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_OF_4_BIT = 2**16  # values in a piece: whole blocks of every size
CHUNK_OF_INT8 = 2**18  # INT8 takes less memory and time for each value


def create_in_chunks(quantizer: Any, weight: Tensor) -> Callable[..., Any]:
    """Return ``create_quantized_param`` of transformers 4; it quantizes a large ``weight`` in pieces."""
    create: Callable[..., Any] = quantizer.create_quantized_param
    size = CHUNK_OF_INT8 if quantizer.quantization_config.load_in_8bit else CHUNK_OF_4_BIT
    return create if quantizer.pre_quantized or weight.numel() < 2 * size else call_in_chunks(create)


def call_in_chunks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function``: a large weight that it quantizes on a CPU is quantized in pieces."""

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        with _mode()():
            return function(*args, **options)

    return called


def convert_in_chunks(mapping: Any, device_map: Any) -> Callable[..., Any]:
    """Return ``mapping.convert`` of transformers 5; it quantizes large weights in pieces."""
    upstream: Callable[..., Any] = mapping.convert
    if not isinstance(device_map, OffloadMap):
        return upstream
    operations = [*getattr(mapping, "operations", ()), mapping.quantization_operation]
    operations = [operation for operation in operations if operation is not None]

    @functools.wraps(upstream)
    def convert(*args: Any, **options: Any) -> Any:
        try:  # only while an operation converts: upstream also reads the tensors, which needs no mode
            for operation in operations:
                operation.convert = _convert_large_in_chunks(operation)
            return upstream(*args, **options)
        finally:
            for operation in operations:
                vars(operation).pop("convert", None)

    return convert


def _convert_large_in_chunks(operation: Any) -> Callable[..., Any]:
    """Return ``operation.convert``, in the mode only if a weight is large: the mode slows every operation of torch."""
    convert: Callable[..., Any] = operation.convert
    name = type(operation).__name__
    if name.endswith("Deserialize"):  # packed already
        return convert
    least = 2 * (CHUNK_OF_INT8 if name == "Bnb8bitQuantize" else CHUNK_OF_4_BIT)

    @functools.wraps(convert)
    def converted(tensors: Any, *args: Any, **options: Any) -> Any:
        large = any(_values(value) >= least for value in tensors.values())
        return (call_in_chunks(convert) if large else convert)(tensors, *args, **options)

    return converted


def _values(tensors: Any) -> int:
    return sum(map(_values, tensors)) if isinstance(tensors, (list, tuple)) else int(tensors.numel())


@functools.cache
def _mode() -> type[Any]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    operators = torch.ops.bitsandbytes
    pieces: dict[Any, tuple[Callable[..., Any], int]] = {
        operators.quantize_4bit.default: (_of_4_bits, CHUNK_OF_4_BIT),
        operators.int8_vectorwise_quant.default: (_of_int8, CHUNK_OF_INT8),
    }

    class InPieces(TorchDispatchMode):
        """Stands between a call of an operator and its kernel."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = kwargs or {}
            divided, size = pieces.get(func, (None, 0))
            if divided is not None and args[0].device.type == "cpu" and args[0].numel() >= 2 * size:
                return divided(func, *args, **given)
            return func(*args, **given)

    return InPieces


def _of_4_bits(
    quantize: Callable[..., tuple[Tensor, Tensor]], weight: Tensor, blocksize: int, quant_type: str, quant_storage: Any
) -> tuple[Tensor, Tensor]:
    """Quantize as ``quantize_4bit`` does, in pieces: a block is quantized by itself."""
    import torch

    flat = weight.reshape(-1)
    size = flat.numel()
    packed = flat.new_empty(((size + 1) // 2 // quant_storage.itemsize, 1), dtype=quant_storage)
    absmax = flat.new_empty(-(-size // blocksize), dtype=torch.float32)
    _fill((packed, absmax), quantize, _parts(flat, CHUNK_OF_4_BIT), blocksize, quant_type, quant_storage)
    return packed, absmax


def _of_int8(
    quantize: Callable[..., tuple[Tensor, Tensor, Any]], weight: Tensor, threshold: float = 0.0
) -> tuple[Tensor, Tensor, Any]:
    """Quantize as ``int8_vectorwise_quant`` does, in pieces: a row is quantized by itself, unless columns are left out."""
    import torch

    if threshold or weight.dim() != 2:
        return quantize(weight, threshold)
    packed = weight.new_empty(weight.shape, dtype=torch.int8)
    scales = weight.new_empty(len(weight), dtype=torch.float32)
    _fill((packed, scales), quantize, _parts(weight, max(1, CHUNK_OF_INT8 // weight.shape[1])), threshold)
    return packed, scales, None


def _fill(results: tuple[Tensor, Tensor], quantize: Callable[..., Any], parts: list[Tensor], *how: Any) -> None:
    """Quantize ``parts``, and write what each gives behind what the part before gave."""
    starts = [0, 0]
    for part in parts:
        for number, piece in enumerate(quantize(part, *how)[:2]):
            end = starts[number] + piece.shape[0]
            results[number][starts[number] : end] = piece
            starts[number] = end


def _parts(tensor: Tensor, length: int) -> list[Tensor]:
    """Split ``tensor`` into pieces of ``length``, and a last one that has the rest."""
    size = tensor.shape[0]
    ends = [*range(length, size - length + 1, length), size]
    return [tensor[start:end] for start, end in zip([0, *ends], ends)]
