"""Whether codes that arrive without statistics are those that a layer has had all along."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def are_own(codes: Tensor, weight: Tensor, strict: bool) -> bool:
    """Whether ``codes``, of any dtype or sharded, are bit for bit those that ``weight`` holds.

    With ``strict``, codes that are the memory of ``weight`` itself are not: ``broadcast_from_rank0`` has
    written into the layer by the time that it loads.
    """
    import torch

    here, new = (getattr(t, "_local_tensor", t).detach().as_subclass(torch.Tensor) for t in (weight, codes))
    if here.is_meta or new.is_meta or (strict and here.data_ptr() == new.data_ptr()):
        return False
    bits, others = here.view(torch.uint8), new.to(here).view(torch.uint8)  # as bfloat16 some are NaN
    return torch.equal(bits, others)
