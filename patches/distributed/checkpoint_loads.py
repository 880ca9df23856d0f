"""Let ``torch.distributed.checkpoint.load`` read into other tensors first, where the saved form is not the form needed.

``dcp.load`` copies the tensors that it reads straight into the tensors of the state dict that it was given, of which it compares
only names and sizes. Three things of bitsandbytes have a form that depends on who saved them:

- an optimizer state has 8 bits or 32, by how many ranks the parameter was sharded over;
- the quantization state of 4-bit layers is not in a checkpoint that was saved sharded without the plugin;
- its packed entry is JSON text, whose length varies with the digits of its numbers.

These are read into stand-ins, and put where they belong once all is read, still inside the step whose errors DCP
collects: an error on one rank is an error on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..engine import Rewrite
from ..optimizers import state_bits
from ..quantized.own_packed_weights import has_bits_of
from . import checkpoint_plans

if TYPE_CHECKING:
    from torch import Tensor

_PACKED = re.compile(r"(.*)\.quant_state\.bitsandbytes__\w+")
_STATISTICS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_ATTRIBUTE = "_patches_stand_ins"


class StandIns:
    """The tensors that one call of ``dcp.load`` reads into instead of the given ones.

    ``settle`` puts the read tensors into place; ``without_state`` are packed weights that the checkpoint has without their
    quantization state, by name: the weight of the model, and the saved one once it is read.
    """

    def __init__(self, given: dict[str, Any], saved: dict[str, Any]) -> None:
        self.given, self.saved = given, saved
        self.entries = dict(given)
        self.settle: list[Callable[[], None]] = []
        self.without_state: dict[str, tuple[Any, Any]] = {}
        for key in given:
            if state := state_bits.STATE.fullmatch(key):
                self._optimizer_state(key, *state.groups())
            elif packed := _PACKED.fullmatch(key):
                self._statistics(key, packed[1])

    def _optimizer_state(self, key: str, prefix: str, number: str) -> None:
        import torch

        saved, target = self.saved.get(key), self.given[key]
        dtype = getattr(getattr(saved, "properties", None), "dtype", None)
        if (
            saved is None
            or tuple(saved.size) != tuple(target.shape)
            or {dtype, target.dtype} != {torch.uint8, torch.float32}
        ):
            return
        table, scales = f"{prefix}qmap{number}", f"{prefix}absmax{number}"
        read = self.entries[key] = torch.empty_like(target, dtype=dtype)
        if dtype == torch.uint8:
            if missing := [name for name in (table, scales) if name not in self.saved]:
                raise RuntimeError(
                    f"{key!r} is an 8-bit optimizer state, and the checkpoint lacks {missing[0]!r}, needed to read it."
                )
            device = _local(target).device
            parts = [torch.empty(self.saved[name].size, dtype=torch.float32, device=device) for name in (table, scales)]
            self.entries.update(zip((table, scales), parts))
            self.settle.append(partial(_fill_float, target, read, *parts))
        else:
            own = [self.entries.pop(name) for name in (table, scales)]
            self.settle.append(partial(_fill_8_bits, target, read, *own))

    def _statistics(self, key: str, weight: str) -> None:
        import torch

        target, saved = self.given[key], self.saved.get(key)
        if saved is not None:
            if tuple(saved.size) != tuple(target.shape):
                read = self.entries[key] = torch.empty(saved.size, dtype=torch.uint8, device=target.device)
                self.settle.append(partial(setattr, target, "data", read))  # as long as the saved text
            self._other_storage(weight)
            return
        group = [key, *(name for part in _STATISTICS if (name := f"{weight}.{part}") in self.given)]
        known = any(f"{weight}.{part}" in self.saved for part in _STATISTICS)
        if known or weight not in self.saved or weight not in self.given:
            return  # DCP says which key is missing
        for name in group:
            self.entries.pop(name)
        packed = self.given[weight]
        self.entries[weight] = torch.empty_like(packed)
        self.without_state[weight] = packed, self.entries[weight]

    def _other_storage(self, weight: str) -> None:
        """Read packed bits in another dtype of the same size (``quant_storage``), which would be cast like numbers."""
        import torch

        target, saved = self.given.get(weight), self.saved.get(weight)
        dtype = getattr(getattr(saved, "properties", None), "dtype", None)
        if target is None or dtype is None or dtype == target.dtype or dtype.itemsize != target.dtype.itemsize:
            return  # of another size it has another shape, which DCP refuses
        read = self.entries[weight] = torch.empty_like(target, dtype=dtype)
        self.settle.append(partial(_copy_bits, target, read))


def _copy_bits(target: Any, read: Any) -> None:
    import torch

    _local(target).view(torch.uint8).copy_(_local(read).view(torch.uint8))


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def _fill_float(target: Any, quantized: Any, table: Tensor, scales: Tensor) -> None:
    offset: tuple[int, ...] = (0,) * target.dim()
    if hasattr(target, "to_local"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place

        offset = place(tuple(target.shape), target.device_mesh, target.placements)[1]
    values = state_bits.to_float(_local(quantized), table, scales, tuple(offset), tuple(target.shape))
    _local(target).copy_(values)


def _fill_8_bits(target: Any, values: Any, table: Tensor, scales: Any) -> None:
    quantized, found = state_bits.to_8_bits(_local(values), table, _local(scales))
    _local(target).copy_(quantized)
    _local(scales).copy_(found)


def read_into_stand_ins(planner: Any) -> dict[str, Any]:
    """Return the dict that ``planner`` is to read into: its state dict, with stand-ins."""
    import torch

    flat = {key: value for key, value in planner.state_dict.items() if isinstance(value, torch.Tensor)}
    found = StandIns(flat, planner.metadata.state_dict_metadata)
    if found.settle or found.without_state:
        given, removed = planner.state_dict, flat.keys() - found.entries.keys()
        planner.state_dict = {k: v for k, v in {**given, **found.entries}.items() if k not in removed}
        setattr(planner, _ATTRIBUTE, (given, found))
    return planner.state_dict  # type: ignore[no-any-return]


def settle_stand_ins(planner: Any) -> None:
    """Put the read tensors where they belong; raise if packed weights came without their quantization state."""
    import torch

    checkpoint_plans.raise_left_error(planner)
    left: tuple[dict[str, Any], StandIns] | None = getattr(planner, _ATTRIBUTE, None)
    if left is None:
        return
    delattr(planner, _ATTRIBUTE)
    given, found = left
    given.update((k, v) for k, v in planner.state_dict.items() if k in given and not isinstance(v, torch.Tensor))
    planner.state_dict = given
    for settle in found.settle:
        settle()
    foreign = [name for name, (own, read) in found.without_state.items() if not has_bits_of(_local(own), _local(read))]
    if foreign:
        others = f" and {len(foreign) - 1} more differ" if len(foreign) > 1 else " differs"
        raise RuntimeError(
            "The checkpoint has packed 4-bit weights without their quantization state (absmax ...), because it was saved "
            f"sharded without bnb-patches. {foreign[0]!r}{others} from the weight of this model, so the quantization state "
            "of this model cannot stand in for the missing one. No packed weight of the model was changed. Load the "
            "checkpoint into a model that was quantized from the same base weights, and save it again."
        )


READ_INTO_STAND_INS = (
    Rewrite(
        "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.create_local_plan",
        find="create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)",
        replace="create_default_local_load_plan(_patches_stand_in(self), self.metadata, not self.allow_partial_load)",
        names={"_patches_stand_in": read_into_stand_ins},
    ),
    Rewrite(
        "torch.distributed.checkpoint.state_dict_loader:_load_state_dict",
        find="all_reads.wait()",
        replace="all_reads.wait()\n_patches_settle(planner)",
        names={"_patches_settle": settle_stand_ins},
    ),
)
"""Both edits of ``dcp.load``."""
