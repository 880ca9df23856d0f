"""What ``torch.distributed.checkpoint.load`` reads into other tensors first: where the saved form is not the form needed.

``dcp.load`` copies the tensors that it reads straight into the tensors of the state dict that it was given, of which it compares
only names and sizes. Three things of bitsandbytes have a form that depends on who saved them:

- an optimizer state has 8 bits or 32, by how many ranks the parameter was sharded over;
- the quantization state of 4-bit layers is not in a checkpoint that was saved sharded without the plugin;
- the packed entry of it is JSON text, as long as its digits are.

These are read into stand-ins, and put where they belong once all is read, still inside the step whose errors DCP
collects: what fails on one rank is an error on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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

Settle = Callable[[], str]
"""Puts the read tensors into place; says what is wrong, or nothing."""


class StandIns:
    """The tensors that one call reads into instead of the given ones."""

    def __init__(self, given: dict[str, Any], saved: dict[str, Any]) -> None:
        self.given, self.saved = given, saved
        self.entries = dict(given)
        self.settles: list[Settle] = []
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
            self.settles.append(lambda: _fill_float(target, read, *parts))
        else:
            own = [self.given[name] for name in (table, scales)]
            for name in (table, scales):
                self.entries.pop(name)
            self.settles.append(lambda: _fill_8_bits(target, read, *own))

    def _statistics(self, key: str, weight: str) -> None:
        import torch

        target, saved = self.given[key], self.saved.get(key)
        if saved is not None:
            if tuple(saved.size) != tuple(target.shape):
                read = self.entries[key] = torch.empty(saved.size, dtype=torch.uint8, device=target.device)
                self.settles.append(lambda: _replace(target, read))
            self._other_storage(weight)
            return
        group = [key, *(name for part in _STATISTICS if (name := f"{weight}.{part}") in self.given)]
        known = any(f"{weight}.{part}" in self.saved for part in _STATISTICS)
        if known or weight not in self.saved or weight not in self.given:
            return  # DCP says which key is missing
        for name in group:
            self.entries.pop(name)
        codes = self.given[weight]
        read = self.entries[weight] = torch.empty_like(codes)
        self.settles.append(lambda: _compare(weight, codes, read))

    def _other_storage(self, weight: str) -> None:
        """Packed bits in another dtype of the same size (``quant_storage``) would be cast like numbers."""
        import torch

        target, saved = self.given.get(weight), self.saved.get(weight)
        dtype = getattr(getattr(saved, "properties", None), "dtype", None)
        if target is None or dtype is None or dtype == target.dtype or dtype.itemsize != target.dtype.itemsize:
            return  # of another size it has another shape, which DCP refuses
        read = self.entries[weight] = torch.empty_like(target, dtype=dtype)
        self.settles.append(lambda: _same_bits_into(target, read))


def _same_bits_into(target: Any, read: Any) -> str:
    import torch

    _local(target).view(torch.uint8).copy_(_local(read).view(torch.uint8))
    return ""


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def _fill_float(target: Any, codes: Any, table: Tensor, scales: Tensor) -> str:
    offset: tuple[int, ...] = (0,) * target.dim()
    if hasattr(target, "to_local"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place

        offset = place(tuple(target.shape), target.device_mesh, target.placements)[1]
    values = state_bits.to_float(_local(codes), table, scales, tuple(offset), tuple(target.shape))
    _local(target).copy_(values)
    return ""


def _fill_8_bits(target: Any, values: Any, table: Tensor, scales: Any) -> str:
    codes, found = state_bits.to_8_bits(_local(values), table, _local(scales))
    _local(target).copy_(codes)
    _local(scales).copy_(found)
    return ""


def _replace(target: Tensor, text: Tensor) -> str:
    target.data = text  # as long as what was saved, in whatever dict it is
    return ""


def _compare(weight: str, codes: Any, read: Any) -> str:
    return "" if has_bits_of(_local(codes), _local(read)) else weight


def read_into_stand_ins(planner: Any) -> dict[str, Any]:
    """What ``planner`` is to read into: its state dict, with stand-ins."""
    import torch

    flat = {key: value for key, value in planner.state_dict.items() if isinstance(value, torch.Tensor)}
    found = StandIns(flat, planner.metadata.state_dict_metadata)
    if not found.settles:
        return planner.state_dict  # type: ignore[no-any-return]
    removed = flat.keys() - found.entries.keys()
    given = planner.state_dict
    planner.state_dict = {k: v for k, v in {**given, **found.entries}.items() if k not in removed}
    setattr(planner, _ATTRIBUTE, (given, found.settles))
    return planner.state_dict  # type: ignore[no-any-return]


def settle_stand_ins(planner: Any) -> None:
    """Put what was read into stand-ins where it belongs; raises if packed weights came without what they are read
    with."""
    import torch

    checkpoint_plans.raise_left_error(planner)
    found: tuple[dict[str, Any], list[Settle]] | None = getattr(planner, _ATTRIBUTE, None)
    if found is None:
        return
    delattr(planner, _ATTRIBUTE)
    given, settles = found
    given.update((k, v) for k, v in planner.state_dict.items() if k in given and not isinstance(v, torch.Tensor))
    planner.state_dict = given
    foreign = [problem for settle in settles if (problem := settle())]
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
