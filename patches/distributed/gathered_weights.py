"""What FSDP2 gathers that is packed weights: bytes in the dtype of floating point."""

from __future__ import annotations

import sys
from typing import Any

from ..quantized.four_bit import quant_states


def holds_packed_weight(parameter: Any) -> bool:
    """Whether an ``FSDPParam`` shards the packed weight of a layer that bitsandbytes has quantized to 4 bits."""
    modules = sys.modules.get("bitsandbytes.nn.modules")
    if modules is None:
        return False
    owner = parameter._module_info
    if owner.param_name != "weight" or not isinstance(owner.module, (modules.Linear4bit, modules.Embedding4bit)):
        return False
    # The weight is a DTensor by now; the statistics on the layer are how its forward knows as well.
    return quant_states.get_quant_state(owner.module) is not None
