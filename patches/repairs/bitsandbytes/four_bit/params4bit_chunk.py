"""``chunk()`` and ``split()`` of a ``Params4bit`` drop its quantization state, or copy the whole one to each piece."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from ....engine import Finding, Patch, SetAttribute
from ....quantized.four_bit import quant_states
from ....quantized.weights.parameter_copies import make_like, wrap_split_method

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit
    from torch import Tensor


def make_torch_function(original: classmethod[Any, ..., Any]) -> classmethod[Any, ..., Any]:
    """Return a ``Params4bit.__torch_function__`` to replace the one that bitsandbytes defines for chunk and split alone."""
    import torch
    from bitsandbytes.nn.modules import Params4bit

    splits = (torch.chunk, torch.Tensor.chunk, torch.split, torch.Tensor.split)

    def __torch_function__(
        cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super(Params4bit, cls).__torch_function__(func, types, args, kwargs or {})
        if func not in splits or torch.compiler.is_compiling():
            return result
        return _pieces(args[0] if args else kwargs.get("input", kwargs.get("tensor")), result)

    return classmethod(__torch_function__)


def _pieces(whole: Params4bit, parts: tuple[Tensor, ...], dim: int = 0) -> tuple[Tensor, ...]:
    """Turn ``parts``, the plain pieces of ``whole``, into ``Params4bit`` of their own where they are complete blocks."""
    import torch

    if whole.requires_grad and torch.is_grad_enabled():
        return parts
    if not quant_states.is_marked_quantized(whole):
        return tuple(make_like(whole, part, module=None) for part in parts)
    if not _is_packed_column(whole):
        return parts
    made, stop = [], 0
    for part in parts:
        start, stop = stop, stop + part.numel()
        state = _state_of(whole, start, stop)
        if state is not None:
            part = make_like(whole, part, quant_state=state, compress_statistics=state.nested, module=None)
        made.append(part)
    return tuple(made)


def _is_packed_column(weight: Params4bit) -> bool:
    """Tell whether ``weight`` is one whole column of packed bytes, and its statistics are on its device."""
    state = quant_states.get_quant_state(weight)
    if state is None or state.shape is None or quant_states.is_for_cpu_kernel(state):
        return False
    is_full_column = (
        weight.dim() == 2 and weight.shape[1] == 1 and weight.nbytes == quant_states.packed_bytes(state.shape) > 0
    )
    return bool(is_full_column and state.absmax.device == weight.device)


def _state_of(whole: Params4bit, start: int, stop: int) -> QuantState | None:
    """Return the state of the entries from ``start`` to ``stop`` of the column, or None if they are no whole blocks."""
    import torch

    state: Any = quant_states.get_quant_state(whole)
    size, values_per_entry = prod(state.shape), 2 * whole.element_size()
    first, last = start * values_per_entry, min(stop * values_per_entry, size)
    # One entry alone looks like a transposed column to dequantize_4bit.
    if stop - start < 2 or first % state.blocksize or (last % state.blocksize and last != size):
        return None
    part = copy.copy(state)
    row = size // state.shape[0]
    rows = first % row == 0 and last % row == 0
    part.shape = torch.Size([(last - first) // row, *state.shape[1:]] if rows else [last - first])
    _cut(part, first // state.blocksize, -(-last // state.blocksize))
    return part


def _cut(state: QuantState, first: int, last: int) -> None:
    """Leave ``state`` the scales of the blocks from ``first`` to ``last``."""
    from bitsandbytes.functional import dequantize_blockwise

    if state.nested and first % state.state2.blocksize == 0:
        blocks = slice(first // state.state2.blocksize, -(-last // state.state2.blocksize))
        state.state2 = copy.copy(state.state2)
        state.state2.absmax = state.state2.absmax[blocks]
    elif state.nested:
        state.absmax = (dequantize_blockwise(state.absmax, state.state2) + state.offset).float()
        state.nested, state.state2, state.offset = False, None, None
    state.absmax = state.absmax[first:last]


def defect() -> Finding:
    """Chunk and split a weight by methods and by functions, and count the parts that dequantize to their rows."""
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    weight = Linear4bit(64, 64, quant_type="nf4").to("cpu").weight
    expected = dequantize_4bit(weight.data, weight.quant_state).chunk(2)

    def right(part: Any, rows: Tensor) -> bool:
        try:
            return torch.equal(dequantize_4bit(part.data, part.quant_state), rows)
        except (AttributeError, RuntimeError):
            return False

    parts = [*weight.chunk(2), *weight.split(1024), *torch.split(weight, 1024)]
    count = sum(map(right, parts, 3 * expected))
    return Finding(count < len(parts), f"{count} of {len(parts)} parts dequantize to their part of the weight")


_PARAMETER = "bitsandbytes.nn.modules:Params4bit"

PATCH = Patch(
    id="bitsandbytes-params4bit-chunk",
    summary="chunk() and split() of a 4-bit weight drop its quantization state, or copy the whole one to each piece",
    groups=("save", "layers"),
    silent=True,
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L451",),
    why="""
        The methods return plain tensors without class and quantization state. ``torch.chunk`` and ``torch.split``
        keep both since 0.47.0, for FSDP2, but give each piece the quantization state and the shape of the whole
        weight. Such a piece cannot be dequantized, and ``state_dict()`` of half a 64 x 64 weight writes its 1024
        packed bytes with all 64 scales instead of 32. If the weight is not quantized yet, autograd does not see the
        split, and the gradient of the weight is silently lost. Named arguments fail (``torch.chunk(input=weight,
        …)``: IndexError). A piece still refers to the layer of the whole weight, so quantizing the piece overwrites
        the quantization state of that layer. In 0.46.1 all four return plain tensors.
    """,
    repair="""
        With the repair all four do the same (except ``torch.chunk`` on 0.46.1, which no Python code can intercept).
        Packed weights are one column of bytes, so a piece is a range of the flat weight. If the range consists of
        complete blocks, the piece gets their part of the scales, and if it consists of complete rows, it gets the
        shape of these rows. If the weight is double-quantized and the range does not match the blocks of its
        scales, the scales of the piece are dequantized, to the values that dequantizing the whole weight uses. A
        piece of a weight that is not quantized yet can be quantized by itself. Pieces belong to no layer.

        Every other piece is a plain tensor, as the methods returned before: incomplete blocks, pieces that autograd
        or torch.compile must follow, slices, ``narrow``, ``unbind``. That is enough for FSDP2: it copies the pieces
        and computes with the quantization state of the layer.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        *(wrap_split_method("Params4bit", name, _pieces, when="bitsandbytes<0.47") for name in ("chunk", "split")),
        SetAttribute(
            f"{_PARAMETER}.__torch_function__",
            make=make_torch_function,
            original_contains="func in [torch.chunk, torch.split]",
            when="bitsandbytes>=0.47",
        ),
    ),
    defect=defect,
)
