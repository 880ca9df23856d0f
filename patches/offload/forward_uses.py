"""How often a forward uses each module of a model, and how many bytes a use of an offloaded one brings.

A forward uses a module once for each name that it has, and not at all if it is a holder. The embedding of an encoder-decoder is a holder. The model has it as ``shared`` and never calls it; encoder and decoder call
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
    """Count the uses of each module, by its ``id``."""
    found: Counter[int] = Counter()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        found[id(module)] += 1
        called = (child for key, child in module._modules.items() if child is not None and not _holds(module, key))
        waiting.extend(called)
    return found


def _holds(parent: Module, name: str) -> bool:
    """Tell whether ``parent`` has the embedding ``name`` for others inside it, and does not call it."""
    import torch

    held: Any = parent._modules[name]
    code = getattr(inspect.unwrap(type(parent).forward), "__code__", None)
    if not isinstance(held, torch.nn.Embedding) or code is None or name in code.co_names:
        return False
    places = set(_places_of_weight(held))
    siblings = (sibling for key, sibling in parent._modules.items() if key != name and sibling is not None)
    others = (each for sibling in siblings for each in sibling.modules() if isinstance(each, torch.nn.Embedding))
    return any(other is held or places.intersection(_places_of_weight(other)) for other in others)


def _places_of_weight(embedding: Any) -> Iterator[Any]:
    """Yield the ``id`` of its weight, and where it is brought from: a forward leaves each module another object."""
    yield id(embedding.weight)
    for hook in accelerate_hooks.hooks_on(embedding):
        if getattr(hook, "weights_map", None) is not None:
            place = weights_maps.map_and_key(hook, "weight")
            if place:
                yield place


def bytes_of_parameter(tensor: Any) -> int:
    """Count the bytes of ``tensor`` in this process: of a shard the local part, of a quantized tensor of torchao its parts."""
    if inside := parts_of_parameter(tensor):
        return sum(map(bytes_of_parameter, inside))
    return int(tensor.numel()) * int(tensor.element_size())


def parts_of_parameter(tensor: Any) -> list[Any]:
    """Return the tensors that ``tensor`` consists of, such as experts; none for a plain one."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    found = [getattr(tensor, name) for name in flatten(tensor)[0]] if flatten is not None else []
    return [part for part in found if hasattr(part, "element_size")]  # a DTensor names its mesh too


def bytes_per_use(module: Any) -> int:
    """Count the bytes of bringing the parameters of ``module`` itself; tied ones are brought for each module that has them."""
    away = [parameter for parameter in module._parameters.values() if parameter is not None and parameter.is_meta]
    return sum(bytes_of_parameter(parameter) + _bytes_of_scales(parameter) for parameter in away)


def _bytes_of_scales(weight: Any) -> int:
    """Count the bytes of the row scales of an INT8 weight, which accelerate brings with it, wherever they wait."""
    packed = type(weight).__name__ == "Int8Params" and str(weight.dtype) == "torch.int8"
    return 4 * int(weight.shape[0]) if packed else 0
