"""Loading a full state dict on all ranks from rank 0, where it has more than parameters and buffers (torch #149516)."""

from __future__ import annotations

from ...engine import Rewrite

_MOVE = "local_state_dict[key] = local_state_dict[key].cpu()"
SKIP_UNKNOWN_KEYS = Rewrite(
    "torch.distributed._state_dict_utils:_broadcast_state_dict",
    find=_MOVE,
    replace=f"if key in local_state_dict:\n    {_MOVE}",
    count=2,
    when="torch>=2.7",
)
"""With ``cpu_offload``, move to the CPU what the sharded model has, and leave the rest to ``load_state_dict``."""
