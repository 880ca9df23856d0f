"""Weights that a model declares as tied, and that its checkpoint has with different values: transformers 5 does not tie them.

The head of T5 v1.1 and flan-T5 is such a weight. A device map counts it before any weight is read.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..engine import Rewrite
from ..experts import quantized_sizes
from ..process.tensor_bits import have_same_bits
from . import checkpoint_keys, device_maps

# The checkpoint that a map is being made for: files, state dict, and the ``key_mapping`` of ``from_pretrained``.
_checkpoint: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("checkpoint")


def with_checkpoint(upstream: Callable[..., Any], files: Any, state: Any, asked: Any) -> Callable[..., Any]:
    """Return ``_get_device_map`` for the model that is loaded from this checkpoint."""

    def _get_device_map(model: Any, device_map: Any, max_memory: Any, quantizer: Any) -> Any:
        keys = functools.partial(checkpoint_keys.tensor_names, files, state)
        token = _checkpoint.set((files, state, asked))
        try:
            return upstream(model, device_map, max_memory, quantized_sizes.record_packed_experts(quantizer, keys))
        finally:
            _checkpoint.reset(token)

    return _get_device_map


WITH_CHECKPOINT = Rewrite.to_call(  # of each patch that counts what will be loaded
    "transformers.modeling_utils:PreTrainedModel.from_pretrained",
    find="_get_device_map",
    function=with_checkpoint,
    arguments="_get_device_map, checkpoint_files, state_dict, key_mapping",
    when="transformers>=5",
)


def separate_weights(model: Any) -> Iterator[str]:
    """Yield, for each weight that is loaded beside the one it is declared as tied to, the name of that one."""
    files, state, asked = _checkpoint.get((None, None, None))
    tied = device_maps.tied_names(model)
    stored = _names_in_checkpoint(model, tied, files, state, asked) if tied else {}
    for source in dict.fromkeys(tied.values()):
        names = [name for name in (source, *tied) if name == source or tied[name] == source]
        keys = {stored[name] for name in names if name in stored}
        if len(keys) > 1:
            values = checkpoint_keys.map_tensors(files, state, keys).values()
            yield from [source] * (_count_distinct(values) - 1)


def _names_in_checkpoint(model: Any, tied: Mapping[str, str], files: Any, state: Any, asked: Any) -> dict[str, str]:
    """Return the names that tied weights have in the checkpoint, as far as it has them."""
    known = {*tied, *tied.values()}
    ends = tuple({name.rpartition(".")[2] for name in known})
    keys = list(checkpoint_keys.tensor_names(files, state))
    found = checkpoint_keys.names_in_model(model, keys, [key for key in keys if key.endswith(ends)], asked)
    return {name: key for key, name in found.items() if name in known}


def _count_distinct(values: Iterable[Any]) -> int:
    found: list[Any] = []
    for value in values:
        if not any(have_same_bits(value, other) for other in found):
            found.append(value)
    return len(found)
