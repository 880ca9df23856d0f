"""How many times a forward uses each module of a model: once for each name that it has, and not at all if it is a holder.

The embedding of an encoder-decoder is a holder. The model has it as ``shared`` and never calls it; encoder and decoder call
the same module under their own names, or modules of their own with the same weight.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..quantized import accelerate_hooks
from . import weights_maps

if TYPE_CHECKING:
    from torch.nn import Module


def count_forward_uses(model: Module) -> Counter[int]:
    """The number for each module, by its ``id``."""
    found: Counter[int] = Counter()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        found[id(module)] += 1
        called = (child for key, child in module._modules.items() if child is not None and not _holds(module, key))
        waiting.extend(called)
    return found


def _holds(parent: Module, name: str) -> bool:
    """Whether ``parent`` has the embedding ``name`` for others inside it, and does not call it."""
    import torch

    held: Any = parent._modules[name]
    code = getattr(inspect.unwrap(type(parent).forward), "__code__", None)
    if not isinstance(held, torch.nn.Embedding) or code is None or name in code.co_names:
        return False
    places = set(_places(held))
    return any(other is held or places.intersection(_places(other)) for other in _embeddings_beside(parent, name))


def _embeddings_beside(parent: Module, name: str) -> Iterator[Module]:
    import torch

    for key, sibling in parent._modules.items():
        if key != name and sibling is not None:
            yield from (module for module in sibling.modules() if isinstance(module, torch.nn.Embedding))


def _places(embedding: Any) -> Iterator[Any]:
    """What tells its weight: the object, and where it is brought from, because a forward leaves each module another object."""
    yield id(embedding.weight)
    for hook in accelerate_hooks.hooks_on(embedding):
        if getattr(hook, "weights_map", None) is not None:
            place = weights_maps.map_and_key(hook, "weight")
            if place:
                yield place
