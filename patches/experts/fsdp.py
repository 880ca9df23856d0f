"""Quantized experts under FSDP2: each rank holds the packed weights and statistics of its experts.

FSDP2 makes a padded copy of a rank's part (``new_zeros``, then ``copy_``), keeps it flat as well (``view(-1)``), gathers what
``fsdp_pre_all_gather`` gives, and asks ``fsdp_post_all_gather`` for the parameter of all ranks. An expert is whole on one rank:
dimension 0 is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..quantized.quantized_experts import is_quantized_experts

if TYPE_CHECKING:
    import torch

    from .tensor import QuantizedExperts


def new_zeros_of_parts(like: Any, size: torch.Size, ranks: int) -> torch.Tensor:
    """Return ``like.new_zeros(size)``; of quantized experts packed ones, if the ranks have as many experts each."""
    even = is_quantized_experts(like) and size[1:] == like.shape[1:] and like.shape[0] == size[0] * ranks
    if not even or like.chosen is not None:
        made: torch.Tensor = like.new_zeros(size)
        return made
    packed = like.packed.map_stacked_tensors(lambda tensor: tensor.new_zeros(size[0], *tensor.shape[1:]))
    zeros: QuantizedExperts = like.like(packed=packed)
    return zeros


def flatten_for_fsdp(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.view(-1)``, or ``tensor`` itself for quantized experts, whose flat view FSDP2 never reads."""
    return tensor if is_quantized_experts(tensor) else tensor.view(-1)


def from_gathered_shards(
    part: QuantizedExperts, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype
) -> QuantizedExperts:
    """Return the experts of all ranks, with the gathered stacked tensors ``tensors``."""
    return part.like(packed=part.packed.with_tensors(dict(zip(part.packed.stacked(), tensors))), dtype=dtype)


def all_gather_parts(experts: QuantizedExperts, *group: Any) -> Any:
    """Return the parts of all ranks, one after the other: what a full state dict asks for."""
    import torch

    if experts.chosen is not None or experts.dim() != 3:
        return NotImplemented
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    return experts.like(packed=experts.packed.map_stacked_tensors(lambda tensor: gather(tensor.contiguous(), *group)))


def wait_for_parts(experts: QuantizedExperts) -> QuantizedExperts:
    """Return gathered experts once all of them are there."""
    import torch

    return experts.like(packed=experts.packed.map_stacked_tensors(torch.ops._c10d_functional.wait_tensor.default))


def scatter_parts(outputs: list[Any], inputs: list[list[Any]], *rest: Any) -> Any:
    """Run ``scatter_`` on quantized experts: on one after the other of the tensors that they hold."""
    import torch

    work = None
    for name in outputs[0].packed.tensors():
        if work is not None:
            work.wait()  # only the last is waited for by the caller
        to = [part.packed.tensors()[name] for part in outputs]
        parts = [[part.packed.tensors()[name].contiguous() for part in group] for group in inputs]
        _, work = torch.ops.c10d.scatter_.default(to, parts, *rest)
    return outputs, work


def split_into_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Replace quantized experts by the tensors that they hold, which can be broadcast and written into."""
    found: list[torch.Tensor] = []
    for tensor in tensors:
        found += vars(tensor)["packed"].tensors().values() if is_quantized_experts(tensor) else [tensor]
    return found


def collective_rules() -> dict[Any, Callable[..., Any]]:
    """Return the function that stands for each collective where it gets quantized experts."""
    import torch

    if not torch.distributed.is_available():
        return {}
    import torch.distributed._functional_collectives  # defines operators

    functional = torch.ops._c10d_functional
    found: dict[Any, Callable[..., Any]] = {
        functional.all_gather_into_tensor.default: all_gather_parts,
        functional.wait_tensor.default: wait_for_parts,
        torch.ops.c10d.scatter_.default: scatter_parts,
    }
    if (wrap := getattr(functional, "_wrap_tensor_autograd", None)) is not None:
        found[wrap.default] = wait_for_parts
    return found


def refuse_unsupported_collectives(func: Any) -> None:
    """Raise `NotImplementedError` if ``func`` is another collective: it would write into a copy, or read too early."""
    if func.namespace in ("c10d", "_c10d_functional"):
        raise NotImplementedError(
            f"{func} does not support quantized experts, so broadcast_from_rank0 and reductions cannot be used. Load and "
            "save them with torch.distributed.checkpoint (dcp), or on every rank from the same state dict."
        )
