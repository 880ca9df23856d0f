"""Views, copies and moves of quantized experts: none of them dequantizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import fsdp
from .dense_operations import record_dense_operation
from .quantized_tensor import FUNCTIONS, RULES, QuantizedExperts, Rule

aten = torch.ops.aten


def register_rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Make a function stand for these where they get experts: operators below autograd, or functions of Python above it."""

    def add(rule: Rule) -> Rule:
        for function in functions:
            (RULES if isinstance(function, torch._ops.OpOverload) else FUNCTIONS)[function] = rule
        return rule

    return add


# -- views -------------------------------------------------------------------------------------------------------------


@register_rule(aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.detach_.default)
def keep_view(experts: QuantizedExperts) -> Any:
    return experts.like()


@register_rule(aten.select.int)
def select_expert(experts: QuantizedExperts, dim: int, number: int) -> Any:
    if dim % experts.dim() or experts.dim() < 3:
        return NotImplemented
    count = experts.shape[0]
    if not -count <= number < count:
        raise IndexError(f"expert {number} of {count}")
    number = int(number) % count
    return experts.like(chosen=number if experts.chosen is None else experts.numbers()[number])


@register_rule(aten.unbind.int)
def unbind_experts(experts: QuantizedExperts, dim: int = 0) -> Any:
    if dim % experts.dim() or experts.dim() < 3:
        return NotImplemented
    return [experts.like(chosen=number) for number in experts.numbers()]


@register_rule(aten.index.Tensor)
def index_experts(experts: QuantizedExperts, indices: list[torch.Tensor | None]) -> Any:
    ids = indices[0]
    whole = len(indices) == 1 and experts.chosen is None
    if not whole or ids is None or ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        return NotImplemented
    return experts.like(chosen=torch.where(ids < 0, ids + experts.shape[0], ids))


@register_rule(aten.slice.Tensor)
def slice_experts(experts: QuantizedExperts, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if start in (None, 0) and (end is None or end >= experts.shape[dim]) and step == 1:
        return experts.like()
    if dim % experts.dim() or experts.chosen is not None:
        return NotImplemented
    return experts.like(packed=experts.packed.only(slice(start, end, step)))


@register_rule(aten.split.Tensor)
def split_experts(experts: QuantizedExperts, size: int, dim: int = 0) -> Any:
    if dim % experts.dim() or experts.chosen is not None:
        return NotImplemented
    starts = range(0, experts.shape[0], size)
    return [experts.like(packed=experts.packed.only(slice(start, start + size))) for start in starts]


@register_rule(aten.t.default)
def transpose_matrices(experts: QuantizedExperts) -> Any:
    return experts.like(swapped=not experts.swapped)


@register_rule(aten.transpose.int)
def transpose_dims(experts: QuantizedExperts, first: int, second: int) -> Any:
    rank = experts.dim()
    return transpose_matrices(experts) if {first % rank, second % rank} == {rank - 2, rank - 1} else NotImplemented


@register_rule(aten.permute.default)
def permute_dims(experts: QuantizedExperts, dims: list[int]) -> Any:
    order = [dim % experts.dim() for dim in dims]
    kept = list(range(experts.dim()))
    if order == kept:
        return experts.like()
    return transpose_matrices(experts) if order == [*kept[:-2], kept[-1], kept[-2]] else NotImplemented


@register_rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
def reshape_experts(experts: QuantizedExperts, shape: list[int], **kwargs: Any) -> Any:
    """Reshape to the same shape only."""
    here = list(experts.shape)
    asked = [have if want == -1 else want for want, have in zip(shape, here)]
    return experts.like() if len(shape) == len(here) and asked == here else NotImplemented


@register_rule(aten.as_strided.default)
def as_strided(experts: QuantizedExperts, size: list[int], stride: list[int], offset: int | None = None) -> Any:
    """Stride as before only."""
    here = (list(experts.shape), list(experts.stride()), 0)
    return experts.like() if (list(size), list(stride), offset or 0) == here else NotImplemented


@register_rule(aten.is_pinned.default)
def is_pinned(experts: QuantizedExperts, device: Any = None) -> bool:
    return all(tensor.is_pinned() for tensor in experts.packed.tensors().values())


# -- copies and moves ----------------------------------------------------------------------------------------------------


@register_rule(aten.clone.default)
def clone_experts(experts: QuantizedExperts, memory_format: Any = None) -> Any:
    return experts.like(packed=experts.packed.map_tensors(torch.clone))


@register_rule(aten._to_copy.default)
def move_experts(
    experts: QuantizedExperts, dtype: Any = None, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> Any:
    """Show another dtype by another view; move packed weights and statistics to another device, of the chosen alone."""
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    dtype = dtype or experts.dtype
    if device is None or torch.device(device) == experts.device:
        return experts.like(dtype=dtype)
    packed, chosen = experts.packed, experts.chosen
    if isinstance(chosen, int):
        packed, chosen = packed.only(slice(chosen, chosen + 1)), 0
    elif chosen is not None:
        chosen = chosen.to(device)
    packed = packed.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))
    return experts.like(packed=packed, chosen=chosen, dtype=dtype)


@register_rule(aten.empty_like.default)
def empty_like(experts: QuantizedExperts, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    """Return packed weights to be filled, for ``to_empty`` and on the meta device; else floating point."""
    if experts.dim() < 3 or experts.chosen is not None or (dtype or experts.dtype) != experts.dtype:
        return torch.empty(experts.shape, dtype=dtype or experts.dtype, device=device or experts.device)
    return experts.like(packed=experts.packed.map_tensors(lambda tensor: torch.empty_like(tensor, device=device)))


@register_rule(aten.new_zeros.default)
def new_zeros(experts: QuantizedExperts, size: list[int], dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    return torch.zeros(size, dtype=dtype or experts.dtype, device=device or experts.device)


@register_rule(aten.zeros_like.default)
def zeros_like(experts: QuantizedExperts, **kwargs: Any) -> Any:
    return new_zeros(experts, experts.shape, **kwargs)


@register_rule(aten.copy_.default)
def copy_(experts: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copy the packed weights and statistics of other experts that are quantized alike."""
    if not isinstance(experts, QuantizedExperts):
        return NotImplemented
    name = f"quantized experts of shape {tuple(experts.shape)}"
    if not isinstance(source, QuantizedExperts):
        raise RuntimeError(
            f"{name} cannot take a {type(source).__name__} in {source.dtype}, expected quantized experts. Load a state "
            "dict with quantized experts, or quantize after loading: patches.quantize_experts(model)."
        )
    views = experts.chosen is not None or source.chosen is not None or experts.swapped != source.swapped
    if views or experts.packed.layout() != source.packed.layout() or experts.shape != source.shape:
        raise RuntimeError(
            f"{name} cannot take experts with another quantization: expected {experts!r}, got {source!r}"
        )
    to, values = experts.packed.tensors(), source.packed.tensors()
    for key, tensor in to.items():
        tensor.copy_(values[key], non_blocking)
    return experts


@register_rule(aten.set_.source_Tensor)
def set_(experts: Any, source: Any) -> Any:
    """Set a parameter to itself, as ``torch.nn.utils.parametrize`` does."""
    both = isinstance(source, QuantizedExperts) and isinstance(experts, QuantizedExperts)
    return experts if both and experts.packed is source.packed else NotImplemented


@register_rule(torch.Tensor.share_memory_)
def share_memory_(experts: QuantizedExperts) -> QuantizedExperts:
    """Share the tensors that it holds with other processes; the experts themselves have no memory."""
    for tensor in experts.packed.tensors().values():
        tensor.share_memory_()
    return experts


@register_rule(torch.Tensor.is_shared)
def is_shared(experts: QuantizedExperts) -> bool:
    return all(tensor.is_shared() for tensor in experts.packed.tensors().values())


RULES.update(fsdp.collective_rules())


# -- what cannot be --------------------------------------------------------------------------------------


@register_rule(torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def requires_grad_(experts: QuantizedExperts, requires_grad: bool = True) -> Any:
    if requires_grad:
        raise RuntimeError(
            f"quantized experts of shape {tuple(experts.shape)} cannot require gradients, because they are "
            "packed. Train adapters on them, or load the model without quantized experts."
        )
    return NotImplemented


@register_rule(torch.Tensor.numpy)
def refuse_numpy(experts: QuantizedExperts, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"quantized experts of shape {tuple(experts.shape)} have no numpy array, so disk_offload and dispatch_model cannot "
        "write them to the disk. from_pretrained(..., device_map=..., offload_folder=...) can. "
        "experts.dequantize().numpy() gives their values."
    )


@register_rule(torch.Tensor.storage)
def refuse_storage(experts: QuantizedExperts) -> Any:
    """Raise an error to safetensors, which asks for it where the patches that save packed weights are not applied."""
    raise RuntimeError(
        f"quantized experts of shape {tuple(experts.shape)} have no storage in floating point, so safetensors cannot write "
        "them. Call patches.apply(), then save_pretrained again."
    )


@register_rule(torch.Tensor.tolist)
def dense_to_list(experts: QuantizedExperts) -> Any:
    record_dense_operation("tolist", experts)
    return experts.dequantize().tolist()


@register_rule(torch.Tensor.__dlpack__)
def dense_to_dlpack(experts: QuantizedExperts, *args: Any, **kwargs: Any) -> Any:
    """Give another library the values: it reads at an address, where the tensor has none."""
    record_dense_operation("__dlpack__", experts)
    return experts.dequantize().__dlpack__(*args, **kwargs)
