"""Whether packed weights that arrive without statistics equal the ones that a layer has had all along."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def is_own_packed_weight(packed: Tensor, weight: Tensor) -> bool:
    """Tell whether ``packed``, of any dtype or sharded, equal the bits of ``weight``.

    They do if they are the weight itself, or its memory: loading them changes nothing. ``dcp.load`` and
    ``broadcast_from_rank0``, which write into the memory of a weight before it is loaded, have compared the bits that they
    wrote (``checkpoint_loads``, ``full_state_dict``).
    """
    import torch

    here, new = (getattr(t, "_local_tensor", t).detach().as_subclass(torch.Tensor) for t in (weight, packed))
    if here.is_meta or new.is_meta:
        return here.is_meta and new.is_meta  # nothing is copied
    if _is_same_memory(here, new):
        return True
    return has_bits_of(here, new)


def has_bits_of(here: Tensor, new: Tensor) -> bool:
    """Tell whether ``new``, in the dtype of ``here``, equals it bit for bit; as bfloat16 some packed weights are NaN."""
    import torch

    return torch.equal(here.view(torch.uint8), new.to(here).view(torch.uint8))


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    places = {(t.device, t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (one, other)}
    return len(places) == 1
