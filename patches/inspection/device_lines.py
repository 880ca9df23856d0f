"""Where the layers of an offloaded model lie, and the bytes that each use of them copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .layers import Layer
from .records import Place


def device_lines(layers: Iterable[Layer]) -> tuple[Place, ...]:
    """The places, those where layers run first; none if nothing is offloaded."""
    layers = list(layers)
    counts: Counter[str] = Counter()
    quantized: Counter[str] = Counter()
    held: Counter[str] = Counter()
    brought: dict[str, Counter[str]] = {}
    for layer in layers:
        where, _, runs = layer.offloaded.partition(", runs on ")
        place, waits = where or layer.device, layer.waits if where else 0
        counts[place] += 1
        quantized[place] += bool(layer.weight.how)
        held[place] += waits if where else layer.bytes
        if where:
            brought.setdefault(place, Counter())[runs] += layer.brings
            held[runs] += layer.bytes - waits  # statistics and buffers
    if not brought:
        return ()
    names = sorted(held, key=lambda place: place in brought)
    return tuple(Place(n, counts[n], quantized[n], held[n], dict(brought.get(n, {}))) for n in names)
