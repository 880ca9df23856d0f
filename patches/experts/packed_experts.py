"""The packed weights and quantization states of all experts of one parameter, in 4 bits or INT8.

An expert is one matrix, or several that are concatenated by rows after dequantizing (``gate_proj`` and ``up_proj`` of
``gate_up_proj``): each was quantized by itself, as one ``Linear4bit`` would be, so that saved matrices can be named and
read one matrix at a time, and no block of values crosses from one into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from bitsandbytes import functional

from . import int8_matrix

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

TABLES = ("code", "nested_code")
"""Tensors that all experts share."""
BYTES_AT_ONCE = 2**25
"""Bytes of experts that an accelerator dequantizes in one kernel: starting one for each takes longer than it runs."""
Layout = tuple[tuple[tuple[tuple[int, int], tuple[str, ...]], ...], tuple[Any, ...]]
"""For each part its shape and the names of its tensors; the fields of :class:`QuantizationKind`."""


@dataclass(frozen=True)
class PackedMatrix:
    """One matrix of each expert: its packed weights and statistics, stacked over the experts.

    ``shape``: (rows, columns) of the matrix of one expert.
    ``codes``: the packed weights, (experts, packed elements); in INT8 (experts, rows, columns). Pickles hold this name.
    ``absmax``: (experts, blocks), float32, or uint8 with double quantization; in INT8 (experts, rows), float32.
    ``nested_absmax``: (experts, blocks of blocks), ``offset``: (experts,); only with double quantization.
    """

    shape: tuple[int, int]
    codes: torch.Tensor
    absmax: torch.Tensor
    nested_absmax: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    @classmethod
    def from_states(cls, matrices: Sequence[tuple[torch.Tensor, QuantState]]) -> PackedMatrix:
        """Stack the packed weights and quantization states of one matrix of each expert."""
        states = [state for _, state in matrices]
        rows, columns = states[0].shape
        packed = torch.stack([weights.reshape(-1) for weights, _ in matrices])
        absmax = torch.stack([state.absmax for state in states])
        if not states[0].nested:
            return cls((rows, columns), packed, absmax)
        nested = torch.stack([state.state2.absmax for state in states])
        offset = torch.stack([state.offset.float().reshape(()) for state in states])
        return cls((rows, columns), packed, absmax, nested, offset)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return its tensors by name, without absent ones."""
        found = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass(frozen=True)
class QuantizationKind:
    """How the experts of one parameter are quantized: the same for each of them.

    ``quant_type``: ``"nf4"``, ``"fp4"`` or ``"int8"``. The block sizes are for 4 bits.
    ``dtype``: what they dequantize to, before they become the dtype of the parameter.
    ``threshold``: of INT8, from which input on a column is multiplied in floating point. None: products dequantize.
    ``transposed``: whether the parameter shows each matrix transposed, and is contiguous so.
    """

    quant_type: str
    blocksize: int
    dtype: torch.dtype
    nested_blocksize: int = 256
    threshold: float | None = None
    transposed: bool = False

    @property
    def int8(self) -> bool:
        return self.quant_type == "int8"


@dataclass(frozen=True)
class PackedExperts:
    """The experts of one parameter. ``code`` and ``nested_code`` are the tables that packed values in 4 bits are read by."""

    parts: tuple[PackedMatrix, ...]
    kind: QuantizationKind
    code: torch.Tensor | None = None
    nested_code: torch.Tensor | None = None

    @classmethod
    def from_states(cls, matrices: Sequence[Sequence[tuple[torch.Tensor, QuantState]]]) -> PackedExperts:
        """Stack what ``quantize_4bit`` or a checkpoint gives: for each part a list over the experts."""
        parts = tuple(map(PackedMatrix.from_states, matrices))
        state: Any = matrices[0][0][1]
        double = state.state2
        kind = QuantizationKind(
            state.quant_type, state.blocksize, state.dtype, double.blocksize if state.nested else 256
        )
        return cls(parts, kind, state.code, double.code if state.nested else None)

    @classmethod
    def from_scales(
        cls,
        matrices: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
        dtype: torch.dtype,
        threshold: float | None,
    ) -> PackedExperts:
        """Stack INT8 matrices and the scales of their rows: for each part a list over the experts."""
        parts = []
        for group in matrices:
            packed, scales = (torch.stack(tensors) for tensors in zip(*group))
            parts.append(PackedMatrix((packed.shape[1], packed.shape[2]), packed, scales))
        return cls(tuple(parts), QuantizationKind("int8", 0, dtype, threshold=threshold))

    @classmethod
    def from_layout(cls, layout: Layout, tensors: dict[str, torch.Tensor]) -> PackedExperts:
        """Make experts of what :meth:`layout` and :meth:`tensors` give."""
        shapes, kind = layout
        parts = tuple(
            PackedMatrix(shape, **{name: tensors[f"{name}_{i}"] for name in names})
            for i, (shape, names) in enumerate(shapes)
        )
        return cls(parts, QuantizationKind(*kind), tensors.get("code"), tensors.get("nested_code"))

    @property
    def count(self) -> int:
        """How many experts."""
        return len(self.parts[0].codes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """As the parameter in floating point: (experts, rows, columns)."""
        return self.count, sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.parts[0].codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights and statistics."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def layout(self) -> Layout:
        """Return all but the tensors, in plain values."""
        parts = tuple((part.shape, tuple(part.tensors())) for part in self.parts)
        return parts, astuple(self.kind)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name: ``codes_0``, ``absmax_0``, ..., ``code``."""
        tables = {"code": self.code, "nested_code": self.nested_code}
        return {**self.stacked(), **{name: tensor for name, tensor in tables.items() if tensor is not None}}

    def stacked(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name whose first dimension is the experts: all but the tables."""
        return {f"{name}_{i}": tensor for i, part in enumerate(self.parts) for name, tensor in part.tensors().items()}

    def with_tensors(self, tensors: dict[str, torch.Tensor]) -> PackedExperts:
        """Return the same experts with ``tensors`` in the place of their own tensors of these names."""
        return PackedExperts.from_layout(self.layout(), {**self.tensors(), **tensors})

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedExperts:
        """Return the experts with ``change`` made to each tensor."""
        return self.with_tensors({name: change(tensor) for name, tensor in self.tensors().items()})

    def map_stacked_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedExperts:
        """Return the experts with ``change`` made to each tensor but the tables."""
        return self.with_tensors({name: change(tensor) for name, tensor in self.stacked().items()})

    def only(self, experts: slice) -> PackedExperts:
        """Return some of the experts."""
        return self.map_stacked_tensors(lambda tensor: tensor[experts])

    def matrices(self, expert: int) -> Iterator[tuple[torch.Tensor, QuantState]]:
        """Give packed weights in 4 bits, as a column, and the quantization state of each matrix of one expert."""
        for part in self.parts:
            nested: dict[str, Any] = {}
            if part.nested_absmax is not None and part.offset is not None:
                nested = {"state2": self._nested_state(part.nested_absmax[expert]), "offset": part.offset[expert]}
            yield part.codes[expert].unsqueeze(-1), self._state(part.absmax[expert], part.shape, **nested)

    def _state(self, absmax: torch.Tensor, shape: tuple[int, int], **nested: Any) -> QuantState:
        """Return the quantization state of a matrix of ``shape`` with these ``absmax``, as ``Linear4bit`` has it."""
        kind = self.kind
        return functional.QuantState(
            absmax=absmax,
            shape=torch.Size(shape),
            code=self.code,
            blocksize=kind.blocksize,
            quant_type=kind.quant_type,
            dtype=kind.dtype,
            **nested,
        )

    def _nested_state(self, absmax: torch.Tensor) -> QuantState:
        blocksize = self.kind.nested_blocksize
        return functional.QuantState(absmax=absmax, code=self.nested_code, blocksize=blocksize, dtype=torch.float32)

    def dequantize(self, expert: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return one expert in floating point: (rows, columns)."""
        dtype = dtype or self.kind.dtype
        if self.kind.int8:
            matrices = [
                int8_matrix.dequantize_rows(part.codes[expert], part.absmax[expert], dtype) for part in self.parts
            ]
        elif len(self.parts) > 1 and self._in_whole_blocks():
            return self._joined([expert])[0].to(dtype)
        else:
            matrices = [functional.dequantize_4bit(packed, state).to(dtype) for packed, state in self.matrices(expert)]
        return concatenate(matrices, 0)

    def dequantize_each(self, experts: Sequence[int], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Give one after the other, as :meth:`dequantize`. An accelerator dequantizes up to :data:`BYTES_AT_ONCE` at once."""
        size = self.shape[1] * self.shape[2] * self.kind.dtype.itemsize
        several = self.device.type != "cpu" and not self.kind.int8 and self._in_whole_blocks()
        count = max(1, BYTES_AT_ONCE // size) if several else 1
        for first in range(0, len(experts), count):
            if count > 1:
                yield from self._joined(experts[first : first + count]).to(dtype)
            else:
                yield self.dequantize(experts[first], dtype)

    def _in_whole_blocks(self) -> bool:
        return all(part.shape[0] * part.shape[1] % self.kind.blocksize == 0 for part in self.parts)

    def _joined(self, experts: Sequence[int]) -> torch.Tensor:
        """Dequantize all matrices of ``experts`` at once: joining packed weights copies an eighth of the values' bytes."""
        packed = concatenate([_at(part.codes, experts) for part in self.parts], 1)
        absmax = concatenate([self._block_absmax(part, experts) for part in self.parts], 1)
        state = self._state(absmax.flatten(), (len(experts) * self.shape[1], self.shape[2]))
        whole: torch.Tensor = functional.dequantize_4bit(packed.view(-1, 1), state)
        return whole.view(len(experts), *self.shape[1:])

    def _block_absmax(self, part: PackedMatrix, experts: Sequence[int]) -> torch.Tensor:
        """Return the absmax of each block in floating point: (experts, blocks)."""
        absmax = _at(part.absmax, experts)
        if part.offset is None or part.nested_absmax is None:
            return absmax
        size = self.kind.nested_blocksize
        if len(experts) > 1 and absmax.shape[1] % size:  # a block of blocks would reach into the next expert
            return torch.cat([self._block_absmax(part, [expert]) for expert in experts])
        double = self._nested_state(_at(part.nested_absmax, experts).flatten())
        found: torch.Tensor = functional.dequantize_blockwise(absmax.flatten(), double).view(absmax.shape)
        return (found + _at(part.offset, experts).view(-1, 1)).float()


def _at(tensor: torch.Tensor, experts: Sequence[int]) -> torch.Tensor:
    """Return ``tensor`` at ``experts``; a view where they follow one another."""
    first, count = experts[0], len(experts)
    if list(experts) == list(range(first, first + count)):
        return tensor[first : first + count]
    return tensor[torch.tensor(experts, device=tensor.device)]


def concatenate(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return ``tensors`` as one; autocast for another dtype of 16 bits, where ``cat`` raises an error, is off."""
    if len(tensors) == 1:
        return tensors[0]
    with torch.autocast(tensors[0].device.type, enabled=False):
        return torch.cat(tuple(tensors), dim)
