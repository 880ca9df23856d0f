"""Where the parts of a model that does not fit were put: a line in the log, and in the report as long as the model lives."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..offload import forward_uses
from ..process.byte_sizes import format_bytes
from ..process.messages import LOGGER

if TYPE_CHECKING:
    from torch.nn import Module

    from ..offload.offload_map import OffloadMap

_SUMMARIES: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # of each model that is alive


def log_placement(model: Module, device_map: OffloadMap) -> None:
    """Log where the layers of ``model`` are, once when it is loaded, and keep the line for the report."""
    layers: Counter[str] = Counter()
    held: Counter[str] = Counter()
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if own:
            at = device_map.at(name)
            place = str(device_map.main if at is None else at)
            layers[place] += 1
            held[place] += sum(forward_uses.bytes_of_parameter(each) for each in own if id(each) not in seen)
            seen.update(map(id, own))
    placed = ", ".join(f"{place} ({count} layers, {format_bytes(held[place])})" for place, count in layers.items())
    used = forward_uses.count_forward_uses(model)
    copied = format_bytes(sum(used[id(module)] * forward_uses.bytes_per_use(module) for module in model.modules()))
    _SUMMARIES[model] = (
        f"{type(model).__name__} is quantized and placed on {placed}. Each forward copies {copied} from the CPU or the disk "
        f"to {device_map.main}. patches.inspect(model) shows where each part is"
    )
    LOGGER.info("%s", _SUMMARIES[model])


def report_notes() -> tuple[str, ...]:
    """Return the line of each model for the report of all patches, in the order in which they were loaded."""
    return tuple(_SUMMARIES.values())
