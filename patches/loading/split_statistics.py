"""Statistics of quantized weights that a checkpoint of several files holds in another file than the weight."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from . import checkpoint_keys

_OF_4_BIT = re.compile(
    r"(.+\.weight)\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
)
_OF_INT8 = re.compile(r"(.+\.)(?:SCB|weight_format)")

_files_of: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()
"""The files of the checkpoint that a quantizer loads."""
_names_of: WeakKeyDictionary[Any, dict[str, set[str]]] = WeakKeyDictionary()
"""The names of the statistics in these files, by the name of the weight."""


def record_files(quantizer: Any, files: Iterable[Any]) -> None:
    """Record the ``files`` of the checkpoint that ``quantizer`` is about to load."""
    _files_of[quantizer] = [str(file) for file in files]
    _names_of.pop(quantizer, None)


def complete_shard(quantizer: Any, shard: dict[str, Any]) -> dict[str, Any]:
    """Return ``shard``, what one file holds, with all statistics of its own weights and none of others."""
    files = _files_of.get(quantizer, ())
    if len(files) < 2:
        return shard
    names = _names_of.get(quantizer)
    if names is None:
        names = _names_of[quantizer] = _by_weight(checkpoint_keys.tensor_names(files, None))
    missing = {name for weight in names.keys() & shard.keys() for name in names[weight]} - shard.keys()
    strays = {name for weight in names.keys() - shard.keys() for name in names[weight]} & shard.keys()
    if not missing and not strays:
        return shard
    own = {name: tensor for name, tensor in shard.items() if name not in strays}
    return {**own, **checkpoint_keys.map_tensors(files, None, missing)}


def _by_weight(names: Iterable[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in names:
        if of_4_bit := _OF_4_BIT.fullmatch(name):
            found.setdefault(of_4_bit[1], set()).add(name)
        elif of_int8 := _OF_INT8.fullmatch(name):
            found.setdefault(f"{of_int8[1]}weight", set()).add(name)
    return found
