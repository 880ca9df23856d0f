"""The files of layers that diffusers offloads to the disk in groups: each holds what its group had in memory.

diffusers names a file after the name of a module, and takes a file with this name that is there already, whatever is in it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, MutableMapping, MutableSet
from functools import cache
from typing import TYPE_CHECKING, Any

from ..engine import Rewrite
from ..process.tensor_bits import have_same_bits
from ..quantized.int8 import row_scales, weight_moves

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


@cache
def _placeholders() -> MutableMapping[Tensor, tuple[int, str, str]]:
    """Return, for each tensor that is on the disk, the address of what is in its place in memory, the file and the key."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


@cache
def _filled_when_saved() -> MutableSet[Module]:
    """Return the modules whose ``state_dict()`` reads what is on the disk."""
    import weakref

    return weakref.WeakSet()


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
    """Give ``tensor``, if it is on the disk, its values again."""
    values = _stored(tensor, tensor)
    if values is not None:
        tensor.data = values


def _stored(tensor: Tensor, found: Tensor) -> Tensor | None:
    """Return the values of ``tensor``, if ``found``, it or a view of it, is what is in its place in memory; else None."""
    from safetensors import safe_open

    address, file, key = _placeholders().get(tensor, (0, "", ""))
    if not file or found.data_ptr() != address:
        return None
    with safe_open(file, framework="pt") as handle:
        values: Tensor = handle.get_tensor(key)
    return values


def save_what_is_on_disk(group: Any) -> None:
    """Let ``state_dict()`` of the modules of ``group`` hold the values that are on the disk."""
    for module in (*group.modules, group.offload_leader):
        if module not in _filled_when_saved():
            _filled_when_saved().add(module)
            getattr(module, "register_state_dict_post_hook", module._register_state_dict_hook)(_fill)


def _fill(module: Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Replace what is in ``state_dict`` in the place of a tensor that is on the disk."""
    tensors = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for name, tensor in itertools.chain(*tensors):
        found = state_dict.get(prefix + name)
        if found is not None and (values := _stored(tensor, found)) is not None:
            state_dict[prefix + name] = values


def change_weights(change: Callable[..., Any], model: Module, reapply: Callable[[Module], None]) -> Callable[..., Any]:
    """Return ``change``, a function that changes weights of ``model``, which may be offloaded in groups, where they wait."""

    def run(*args: Any, **kwargs: Any) -> Any:
        weights = ((module, module._parameters.get("weight")) for module in model.modules())
        layers = [(module, weight.data_ptr()) for module, weight in weights if row_scales.is_int8(weight)]
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            _restore(tensor)
        for layer, address in layers:
            weight_moves.follow_move(layer, layer.weight, address)
        try:
            return change(*args, **kwargs)
        finally:
            reapply(model)  # the groups know the weights by the objects that they were

    return run


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


_OFFLOAD = "diffusers.hooks.group_offloading:ModuleGroup._offload_to_disk"
_PLACEHOLDER = "torch.empty_like(tensor_obj.data, device=self.offload_device)"
REMEMBER = Rewrite.to_call(_OFFLOAD, _PLACEHOLDER, make_placeholder, f"{_PLACEHOLDER}, self, tensor_obj")
"""Know which tensors are on the disk, and where."""
OWN_FILES = (
    Rewrite.to_call(
        _OFFLOAD,
        find="not self._is_offloaded_to_disk and not os.path.exists(self.safetensors_file_path)",
        function=must_write,
        arguments="self",
    ),
    REMEMBER,
)
"""Give each group a file that holds its tensors."""
SAVE = Rewrite(
    _OFFLOAD,
    find="self._is_offloaded_to_disk = True",
    replace="self._is_offloaded_to_disk = True\n_patches_save_what_is_on_disk(self)",
    names={"_patches_save_what_is_on_disk": save_what_is_on_disk},
)
"""Let ``state_dict()`` read what is on the disk."""
