"""The packed weights and quantization states of all experts of one parameter, in 4 bits or INT8.

An expert is one matrix, or several that are concatenated by rows after dequantizing (``gate_proj`` and ``up_proj`` of
``gate_up_proj``): each was quantized by itself, as one ``Linear4bit`` would be, so that saved matrices can be named and
read one matrix at a time, and no block of values crosses from one into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any

from . import int8_matrix

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState

TABLES = ("code", "nested_code")
"""Tensors that all experts share."""
VALUES_AT_ONCE = 2**25
"""Bytes of experts that an accelerator dequantizes in one kernel: starting one for each takes longer than it runs."""
Layout = tuple[tuple[tuple[tuple[int, int], tuple[str, ...]], ...], tuple[Any, ...]]
"""For each part its shape and the names of its tensors; the fields of :class:`QuantizationKind`."""


@dataclass(frozen=True)
class PackedMatrix:
    """One matrix of each expert: its packed weights and statistics, stacked over the experts."""

    shape: tuple[int, int]
    """Of the matrix of one expert."""
    codes: torch.Tensor
    """(experts, packed elements); in INT8 (experts, rows, columns)."""
    absmax: torch.Tensor
    """(experts, blocks): float32, or uint8 with double quantization; in INT8 (experts, rows), float32."""
    nested_absmax: torch.Tensor | None = None
    """(experts, blocks of blocks), with double quantization."""
    offset: torch.Tensor | None = None
    """(experts,), with double quantization."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by name; absent ones are left out."""
        found = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass(frozen=True)
class QuantizationKind:
    """How the experts of one parameter are quantized: the same for each of them."""

    quant_type: str
    """``"nf4"``, ``"fp4"`` or ``"int8"``"""
    blocksize: int
    """Of 4 bits."""
    dtype: torch.dtype
    """What they dequantize to, before they become the dtype of the parameter."""
    nested_blocksize: int = 256
    threshold: float | None = None
    """Of INT8: from which input on a column is multiplied in floating point. None: products dequantize."""
    transposed: bool = False
    """Whether the parameter shows each matrix transposed, and is contiguous so."""

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
    def of_states(cls, matrices: Sequence[Sequence[tuple[torch.Tensor, QuantState]]]) -> PackedExperts:
        """From what ``quantize_4bit`` or a checkpoint gives: for each part a list over the experts."""
        parts = tuple(map(_part, matrices))
        state: Any = matrices[0][0][1]
        double = state.state2
        kind = QuantizationKind(
            state.quant_type, state.blocksize, state.dtype, double.blocksize if state.nested else 256
        )
        return cls(parts, kind, state.code, double.code if state.nested else None)

    @classmethod
    def of_scales(
        cls,
        matrices: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
        dtype: torch.dtype,
        threshold: float | None,
    ) -> PackedExperts:
        """From INT8 matrices and the scales of their rows: for each part a list over the experts."""
        import torch

        parts = []
        for group in matrices:
            codes, scales = (torch.stack(tensors) for tensors in zip(*group))
            parts.append(PackedMatrix((codes.shape[1], codes.shape[2]), codes, scales))
        return cls(tuple(parts), QuantizationKind("int8", 0, dtype, threshold=threshold))

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
        """Of packed weights and statistics."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name: ``codes_0``, ``absmax_0``, ..., ``code``."""
        found = {f"{name}_{i}": tensor for i, part in enumerate(self.parts) for name, tensor in part.tensors().items()}
        tables = {"code": self.code, "nested_code": self.nested_code}
        return {**found, **{name: tensor for name, tensor in tables.items() if tensor is not None}}

    def with_tensors(self, tensors: dict[str, torch.Tensor]) -> PackedExperts:
        """The same experts in other tensors, named as :meth:`tensors` names them."""
        return PackedExperts.laid_out(self.layout(), tensors)

    def layout(self) -> Layout:
        """All but the tensors, in plain values."""
        parts = tuple((part.shape, tuple(part.tensors())) for part in self.parts)
        return parts, astuple(self.kind)

    @classmethod
    def laid_out(cls, layout: Layout, tensors: dict[str, torch.Tensor]) -> PackedExperts:
        """From what :meth:`layout` and :meth:`tensors` give."""
        shapes, kind = layout
        parts = tuple(
            PackedMatrix(shape, **{name: tensors[f"{name}_{i}"] for name in names})
            for i, (shape, names) in enumerate(shapes)
        )
        return cls(parts, QuantizationKind(*kind), tensors.get("code"), tensors.get("nested_code"))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedExperts:
        """With ``change`` made to each tensor."""
        return self.with_tensors({name: change(tensor) for name, tensor in self.tensors().items()})

    def only(self, experts: Any) -> PackedExperts:
        """The experts at ``experts``: a slice, or a tensor of indices."""
        return self.with_tensors({n: t if n in TABLES else t[experts] for n, t in self.tensors().items()})

    def state(self, part: PackedMatrix, expert: int) -> QuantState:
        """The quantization state of one matrix in 4 bits, as ``Linear4bit`` has it."""
        import torch
        from bitsandbytes.functional import QuantState

        double, kind = None, self.kind
        if part.nested_absmax is not None:
            double = QuantState(
                absmax=part.nested_absmax[expert],
                code=self.nested_code,
                blocksize=kind.nested_blocksize,
                dtype=torch.float32,
            )
        return QuantState(
            absmax=part.absmax[expert],
            shape=torch.Size(part.shape),
            code=self.code,
            blocksize=kind.blocksize,
            quant_type=kind.quant_type,
            dtype=kind.dtype,
            offset=part.offset[expert] if part.offset is not None else None,
            state2=double,
        )

    def matrices(self, expert: int) -> Iterator[tuple[torch.Tensor, QuantState]]:
        """Packed weights in 4 bits, as a column, and quantization state of each matrix of one expert."""
        for part in self.parts:
            yield part.codes[expert].unsqueeze(-1), self.state(part, expert)

    def dequantize(self, expert: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One expert in floating point: (rows, columns)."""
        import torch
        from bitsandbytes.functional import dequantize_4bit

        dtype = dtype or self.kind.dtype
        if self.kind.int8:
            matrices = [
                int8_matrix.dequantize_rows(part.codes[expert], part.absmax[expert], dtype) for part in self.parts
            ]
        elif len(self.parts) > 1 and self._in_whole_blocks():
            return self._joined([expert])[0].to(dtype)
        else:
            matrices = [dequantize_4bit(codes, state).to(dtype) for codes, state in self.matrices(expert)]
        return matrices[0] if len(matrices) == 1 else join_matrices(matrices, torch.cat)

    def dequantize_each(self, experts: Sequence[int], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """One after the other, as :meth:`dequantize`. An accelerator dequantizes several at once, up to :data:`VALUES_AT_ONCE`."""
        size = self.shape[1] * self.shape[2] * self.kind.dtype.itemsize
        several = self.device.type != "cpu" and not self.kind.int8 and self._in_whole_blocks()
        count = max(1, VALUES_AT_ONCE // size) if several else 1
        for first in range(0, len(experts), count):
            if count > 1:
                yield from self._joined(experts[first : first + count]).to(dtype)
            else:
                yield self.dequantize(experts[first], dtype)

    def _in_whole_blocks(self) -> bool:
        return all(part.shape[0] * part.shape[1] % self.kind.blocksize == 0 for part in self.parts)

    def _joined(self, experts: Sequence[int]) -> torch.Tensor:
        """All matrices of ``experts`` at once: packed weights are joined, which are an eighth of what they stand for."""
        import torch
        from bitsandbytes.functional import QuantState, dequantize_4bit

        kind = self.kind
        codes = join_matrices([_at(part.codes, experts) for part in self.parts], _side_by_side)
        absmax = join_matrices([self._block_absmax(part, experts) for part in self.parts], _side_by_side)
        state = QuantState(
            absmax=absmax.flatten(),
            shape=torch.Size((len(experts) * self.shape[1], self.shape[2])),
            code=self.code,
            blocksize=kind.blocksize,
            quant_type=kind.quant_type,
            dtype=kind.dtype,
        )
        whole: torch.Tensor = dequantize_4bit(codes.view(-1, 1), state)
        return whole.view(len(experts), *self.shape[1:])

    def _block_absmax(self, part: PackedMatrix, experts: Sequence[int]) -> torch.Tensor:
        """The absmax of each block in floating point: (experts, blocks)."""
        absmax = _at(part.absmax, experts)
        if part.offset is None or part.nested_absmax is None:
            return absmax
        import torch
        from bitsandbytes.functional import QuantState, dequantize_blockwise

        size = self.kind.nested_blocksize
        if len(experts) > 1 and absmax.shape[1] % size:  # a block of blocks would reach into the next expert
            return torch.cat([self._block_absmax(part, [expert]) for expert in experts])
        nested = _at(part.nested_absmax, experts).flatten()
        double = QuantState(absmax=nested, code=self.nested_code, blocksize=size, dtype=torch.float32)
        found: torch.Tensor = dequantize_blockwise(absmax.flatten(), double).view(absmax.shape)
        return (found + _at(part.offset, experts).view(-1, 1)).float()


def _at(tensor: torch.Tensor, experts: Sequence[int]) -> torch.Tensor:
    """Of ``experts``; a view where they follow one another."""
    first, count = experts[0], len(experts)
    if list(experts) == list(range(first, first + count)):
        return tensor[first : first + count]
    import torch

    return tensor[torch.tensor(experts, device=tensor.device)]


def _side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), 1)


def join_matrices(matrices: Sequence[torch.Tensor], how: Callable[..., torch.Tensor]) -> torch.Tensor:
    """``how`` (cat or stack) of ``matrices``; where autocast is on for another dtype of 16 bits it would raise an error."""
    import torch

    with torch.autocast(matrices[0].device.type, enabled=False):
        return how(matrices)


def _part(matrices: Sequence[tuple[torch.Tensor, Any]]) -> PackedMatrix:
    import torch

    states = [state for _, state in matrices]
    rows, columns = states[0].shape
    codes = torch.stack([codes.reshape(-1) for codes, _ in matrices])
    absmax = torch.stack([state.absmax for state in states])
    if not states[0].nested:
        return PackedMatrix((rows, columns), codes, absmax)
    nested = torch.stack([state.state2.absmax for state in states])
    return PackedMatrix(
        (rows, columns), codes, absmax, nested, torch.stack([s.offset.float().reshape(()) for s in states])
    )
