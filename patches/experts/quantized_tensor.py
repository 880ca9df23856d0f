"""A parameter that looks like the experts of a layer in floating point, and holds packed weights.

What operators do with it is in :data:`RULES` and :data:`FUNCTIONS`, which ``.views`` and ``.products`` fill; ``.tensor``
imports all of it. Indexing, slicing over experts and transposing give views. A product dequantizes one expert at a time (a
few at once on an accelerator). Autograd saves the view, which costs no bytes, and the product of the backward dequantizes again. So no
model is edited, and nothing that is dequantized is kept. Any other operation gets all experts in floating point, and this is
recorded (``.dense_operations``); one that would write into them raises an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..process import tracing
from . import fsdp
from .dense_operations import record_dense_operation
from .packed_experts import PackedExperts

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""Operators (``__torch_dispatch__``) and the functions that implement them; one that returns ``NotImplemented`` dequantizes."""
FUNCTIONS: dict[Any, Rule] = {}
"""The same for ``__torch_function__``: functions of Python above autograd, where gradients of other arguments are recorded."""


class QuantizedExperts(torch.Tensor):
    """All experts of one parameter, or one of them, or a choice: (experts, rows, columns) or (rows, columns).

    ``chosen``: None for all, a number for one, a tensor for a choice with repetitions, as ``experts[ids]`` makes.
    ``swapped``: whether rows and columns are exchanged.
    ``rebuild``: the function that a pickle calls; :mod:`.tensor` sets it.
    ``graph_key``: a part of the key of torch's cache of compiled graphs on disk; :mod:`.products` sets it.
    """

    packed: PackedExperts
    chosen: int | torch.Tensor | None
    swapped: bool
    rebuild: Callable[..., torch.Tensor]
    graph_key: str

    @staticmethod
    def __new__(
        cls,
        packed: PackedExperts | QuantizedExperts,
        chosen: int | torch.Tensor | None = None,
        swapped: bool = False,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> QuantizedExperts:
        if isinstance(packed, QuantizedExperts):  # accelerate makes a parameter of the same class on another device
            return torch.nn.Parameter(packed.like(), requires_grad=requires_grad)  # type: ignore[return-value]
        experts, rows, columns = packed.shape
        first = [] if isinstance(chosen, int) else [experts if chosen is None else len(chosen)]
        shape = [columns, rows] if swapped else [rows, columns]
        strides = [shape[1], 1] if swapped == packed.kind.transposed else [1, shape[0]]
        with _no_inference_tensor():
            self: QuantizedExperts = torch.Tensor._make_wrapper_subclass(
                cls,
                [*first, *shape],
                strides=[*([rows * columns] if first else []), *strides],
                dtype=dtype or packed.kind.dtype,
                device=packed.device,
                requires_grad=False,
            )
        self.packed, self.chosen, self.swapped = packed, chosen, swapped
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def like(self, **changed: Any) -> QuantizedExperts:
        """Return another view of the same packed weights."""
        now = {"packed": self.packed, "chosen": self.chosen, "swapped": self.swapped, "dtype": self.dtype}
        return make_experts(**{**now, **changed})

    def numbers(self) -> list[int]:
        """Return the numbers of the experts in the first dimension, in its order."""
        if isinstance(self.chosen, int):
            return [self.chosen]
        if self.chosen is None:
            return list(range(self.packed.count))
        return list(map(int, self.chosen.tolist()))

    def expert(self, number: int) -> torch.Tensor:
        """Return expert ``number`` of all, in floating point, as this view shows it."""
        matrix = self.packed.dequantize(number, self.dtype)
        return matrix.t() if self.swapped else matrix

    def iter_dequantized(self, numbers: Sequence[int]) -> Iterator[torch.Tensor]:
        """Give the experts ``numbers`` of all, one after the other, as :meth:`expert`."""
        for matrix in self.packed.dequantize_each(numbers, self.dtype):
            yield matrix.t() if self.swapped else matrix

    def dequantize(self) -> torch.Tensor:
        """Return all its values, in floating point."""
        if isinstance(self.chosen, int):
            return self.expert(self.chosen)
        matrices = [self.expert(number) for number in self.numbers()]
        with torch.autocast(
            self.device.type, enabled=False
        ):  # under it, stack raises an error for another 16-bit dtype
            return torch.stack(matrices)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of packed weights and statistics."""
        return self.packed.nbytes

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, QuantizedExperts) or value.shape != self.shape:
            got = f"{type(value).__name__} {tuple(getattr(value, 'shape', ()))}"
            raise RuntimeError(
                f"quantized experts of shape {tuple(self.shape)} cannot take {got} as .data: replace the parameter of the "
                "module instead"
            )
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.packed, self.chosen, self.swapped = value.packed, value.chosen, value.swapped

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind, size = self.packed.kind, self.nbytes
        return f"{type(self).__name__}({tuple(self.shape)}, dtype={self.dtype}, {kind.quant_type}, {size} bytes, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            copied: torch.Tensor = self.like(packed=self.packed.map_tensors(torch.clone))
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, requires_grad=False)
            memo[id(self)] = copied
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        parameter = isinstance(self, torch.nn.Parameter)
        packed = self.packed
        return self.rebuild, (packed.layout(), packed.tensors(), self.chosen, self.swapped, self.dtype, parameter)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = list(self.packed.tensors())
        chosen = self.chosen if isinstance(self.chosen, int) else None
        if isinstance(self.chosen, torch.Tensor):
            names.append("chosen")
        return names, (self.packed.layout(), chosen, self.swapped, self.dtype, self.graph_key)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any) -> QuantizedExperts:
        layout, chosen, swapped, dtype, _ = meta
        return make_experts(PackedExperts.from_layout(layout, tensors), tensors.get("chosen", chosen), swapped, dtype)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        """Return the tensors of a rank's part for FSDP2 to gather; the tables are alike on all ranks."""
        return tuple(self.packed.stacked().values()), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the experts of all ranks; none if ``out`` was made before, whose memory FSDP2 has filled again."""
        return None if out is not None else (fsdp.from_gathered_shards(self, all_gather_outputs, param_dtype), ())

    def __getattr__(self, name: str) -> Any:
        tensors = vars(self)["packed"].tensors() if "packed" in vars(self) else {}
        if name in tensors:
            return tensors[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = FUNCTIONS.get(func)
        result = rule(*args, **kwargs) if rule is not None else NotImplemented
        if result is not NotImplemented:
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    @tracing.never_compile  # outside of a graph; it makes tensors that have no packed weights yet
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        result = rule(*args, **kwargs) if rule is not None else NotImplemented
        if result is NotImplemented and rule is None:  # in inference mode composite operators are not decomposed yet
            result = func.decompose(*args, **kwargs)
        return run_dequantized(func, args, kwargs) if result is NotImplemented else result


class Experts4bit(QuantizedExperts):
    """Experts in NF4 or FP4."""


class Experts8bit(QuantizedExperts):
    """Experts in INT8."""


def make_experts(packed: PackedExperts, *args: Any, **kwargs: Any) -> QuantizedExperts:
    """Make experts of the class for the bits of ``packed``."""
    return (Experts8bit if packed.kind.int8 else Experts4bit)(packed, *args, **kwargs)


def run_dequantized(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` on dequantized experts; raise an error if it would write into them."""
    _refuse_writes(func, args, kwargs)
    fsdp.refuse_unsupported_collectives(func)

    def dense(value: Any) -> Any:
        if not isinstance(value, QuantizedExperts):
            return value
        record_dense_operation(str(func), value)
        return value.dequantize()

    with _no_inference_tensor() if _is_view(func) else contextlib.nullcontext():
        return func(*tree_map(dense, args), **tree_map(dense, kwargs))


def _is_view(func: Any) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)


def _refuse_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for value in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):  # or a list of tensors
            if isinstance(value, QuantizedExperts):
                raise RuntimeError(
                    f"{func} would write into quantized experts ({tuple(value.shape)}), whose values are packed. "
                    "Merging and unmerging adapters needs the patch torch-quantized-experts: call patches.apply() before. "
                    "For any other change dequantize the model first (model.dequantize())."
                )


def _no_inference_tensor() -> contextlib.AbstractContextManager[Any]:
    """Leave inference mode, if it is on: the result would be an inference tensor, and a view of an ordinary tensor must not be."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
