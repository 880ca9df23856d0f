"""Whether codes that arrive without statistics are those that a layer has had all along."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from torch import Tensor

_LOADER = "torch.distributed.checkpoint.state_dict"


def are_own(codes: Tensor, weight: Tensor) -> bool:
    """Whether ``codes``, of any dtype or sharded, are bit for bit those that ``weight`` holds.

    They are if they are the weight itself, or its memory: loading them changes nothing. The one exception is
    ``set_model_state_dict(broadcast_from_rank0=True)``, which writes into the local memory of each ``DTensor``
    before it loads the parameters themselves. (A weight that is not sharded gets a tensor of its own. With
    ``strict=False`` a weight that rank 0 has nothing for is loaded as well, such as all but the adapters.)
    """
    import torch

    here, new = (getattr(t, "_local_tensor", t).detach().as_subclass(torch.Tensor) for t in (weight, codes))
    if here.is_meta or new.is_meta:
        return here.is_meta and new.is_meta  # nothing is copied
    if _is_same_memory(here, new):
        return not (hasattr(weight, "_local_tensor") and _was_sent_by_rank_0())
    bits, others = here.view(torch.uint8), new.to(here).view(torch.uint8)  # as bfloat16 some are NaN
    return torch.equal(bits, others)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    places = {(t.device, t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (one, other)}
    return len(places) == 1


def _was_sent_by_rank_0() -> bool:
    """Whether what is being loaded now was broadcast, and every key of it.

    The loading layer is told neither: ``nn.Module`` passes ``strict=True`` to it whatever it was given itself. So
    the options are read where they are, in the frame of torch's function.
    """
    module: Any = sys.modules.get(_LOADER)
    frame: FrameType | None = sys._getframe() if module is not None else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _LOADER:
            for value in frame.f_locals.values():
                if isinstance(value, module.StateDictOptions):
                    return bool(value.broadcast_from_rank0 and value.strict)
        frame = frame.f_back
    return False
