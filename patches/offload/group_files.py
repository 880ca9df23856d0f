"""The files of layers that diffusers offloads to the disk in groups: each holds what its group had in memory.

diffusers names a file after the name of a module, and takes a file with this name that is there already, whatever is in it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ..process.tensor_bits import have_same_bits

if TYPE_CHECKING:
    from torch import Tensor


@cache
def _placeholders() -> MutableMapping[Tensor, tuple[int, str, str]]:
    """Return, for each tensor that is on the disk, the address of what is in its place in memory, the file and the key."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


def make_placeholder(upstream: Tensor, group: Any, tensor: Tensor) -> Tensor:
    """Return ``upstream``, which takes the place of ``tensor`` of ``group`` in memory, and remember where its values are."""
    _placeholders()[tensor] = upstream.data_ptr(), group.safetensors_file_path, group.tensor_to_key[tensor]
    return upstream


def must_write(group: Any) -> bool:
    """Tell whether the tensors of ``group`` are to be written, and choose its file: one that holds them, or a new one."""
    if group._is_offloaded_to_disk:
        return False
    for tensor in group.tensor_to_key:
        _restore(tensor)
    for path in _names(group.safetensors_file_path):
        if not os.path.exists(path):
            group.safetensors_file_path = path
            return True
        if _holds(path, group.tensor_to_key):
            group.safetensors_file_path = path
            return False
    raise AssertionError("there is always one more name")


def _restore(tensor: Tensor) -> None:
    """Give ``tensor``, which another group has offloaded and is not used any more, the values that are on the disk."""
    from safetensors import safe_open

    address, file, key = _placeholders().get(tensor, (0, "", ""))
    if file and tensor.data_ptr() == address:
        with safe_open(file, framework="pt") as handle:
            tensor.data = handle.get_tensor(key)


def _names(path: str) -> Iterator[str]:
    """Yield ``path``, and then other names like it."""
    base, extension = os.path.splitext(path)
    yield path
    for count in itertools.count(1):
        yield f"{base}_{count}{extension}"


def _holds(path: str, wanted: dict[Tensor, str]) -> bool:
    """Tell whether the file ``path`` holds these tensors, bit for bit, by these keys, and no others."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as handle:
            shapes = {key: handle.get_slice(key).get_shape() for key in handle.keys()}
            if shapes != {key: list(tensor.shape) for tensor, key in wanted.items()}:
                return False
            return all(have_same_bits(handle.get_tensor(key), tensor.data.cpu()) for tensor, key in wanted.items())
    except (OSError, SafetensorError):  # another process is writing it
        return False
