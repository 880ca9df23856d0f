"""A device map for a quantized model that does not fit, by the bytes that its modules will take.

transformers counts half a byte for a weight of 4 bits and none for its absmax, and keeps room for quantizing (a tenth)
and for a layer that computes. Here the true sizes are counted: packed weights, statistics, row scales, buffers, and
unquantized weights in their own dtype. Statistics of 4-bit weights and buffers stay on the device where their layer
computes, wherever its weights wait, and so they count there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..config.quantizers import makes_parameter
from ..offload import offload_map
from . import device_maps, weights_stored_separately


class Unit(NamedTuple):
    """A module that goes to one place."""

    name: str
    module: Any
    moves: int  # bytes that wait where the map says
    stays: int  # bytes that stay on the device where it computes
    block: bool  # one of the layers that the model repeats
    listed: bool = True  # in a ModuleList: all of it can compute on one device if it is split (:mod:`.split_layers`)


@dataclass
class Room:
    """A place with so many bytes left."""

    place: offload_map.Place
    left: float


Sizes = dict[str, tuple[int, int]]  # for each tensor by its name: the bytes that move, and the bytes that stay
Map = dict[str, offload_map.Place]


def infer_by_true_sizes(infer: Callable[..., Any], max_memory: Any, quantizer: Any) -> Callable[..., Any]:
    """Return ``infer_auto_device_map``, by the true sizes where transformers' map offloads, or holds more than allowed."""

    def infer_auto_device_map(model: Any, **options: Any) -> Any:
        device_map = infer(model, **options)
        fits = {*offload_map.OFFLOADED}.isdisjoint(device_map.values())
        if not device_maps.supports_offload(quantizer) or fits and not max_memory:
            return device_map
        sizes = tensor_sizes(model, quantizer, options.get("special_dtypes"))
        if fits and _is_allowed(device_map, sizes, max_memory):
            return device_map
        from accelerate.utils.modeling import clean_device_map

        units = list(_units(model, "", sizes, set(options["no_split_module_classes"] or ())))
        resident, waiting = _rooms(max_memory, units)
        # Everything is on the CPU if there is no device, or if the first module alone is too large for the device.
        if not device_maps.offloads_something(device_map) and all(room.place == "cpu" for room in resident):
            return device_map
        found = _place_units(units, sizes, resident, waiting, _bytes_to_quantize(model, quantizer, units))
        for name, source in device_maps.tied_names(model).items():  # tied weights lie in one place
            mine, theirs = (offload_map.find_enclosing(found, each) for each in (name, source))
            if mine is not None and theirs is not None:
                found[mine] = found[theirs]
        # Layers that wait compute on the first device that a map names: the one where room was left for their statistics.
        first = next((room.place for room in resident if room.place in found.values()), None)
        return dict(sorted(clean_device_map(found).items(), key=lambda item: item[1] != first))

    return infer_auto_device_map


def _is_allowed(device_map: Any, sizes: Sizes, max_memory: Any) -> bool:
    """Tell whether no device holds more than the program allows it; transformers counts no absmax."""
    held: Counter[offload_map.Place] = Counter()
    for name, size in sizes.items():
        at = offload_map.find_enclosing(device_map, name)
        held[None if at is None else device_map[at]] += sum(size)
    allowed = {place: size for place, size in _memory(max_memory).items() if place in max_memory}
    return all(held[place] <= allowed.get(place, held[place]) for place in held)


def tensor_sizes(model: Any, quantizer: Any, special_dtypes: Any = None) -> Sizes:
    """Count the bytes that the parameters and buffers of ``model``, which are on meta, take once it is loaded.

    ``special_dtypes`` are the dtypes to which transformers 4 casts some of them.
    """
    tied, sizes = device_maps.tied_names(model), Sizes()
    dtypes = special_dtypes or _kept_in_another_dtype(model)
    for name, parameter in model.named_parameters():
        if name not in tied:
            if makes_parameter(quantizer, model, name):
                sizes[name] = packed(parameter)
            elif name in dtypes:
                sizes[name] = parameter.numel() * dtypes[name].itemsize, 0
            else:
                sizes[name] = _bytes(quantizer, model, name, parameter), 0
    # A weight that is loaded beside the one that it is declared as tied to counts there: both go to one place.
    for name in weights_stored_separately.separate_weights(model):
        sizes[name] = sizes[name][0] + _bytes(quantizer, model, name, model.get_parameter(name)), sizes[name][1]
    sizes.update({name: (0, buffer.nbytes) for name, buffer in model.named_buffers()})
    return sizes


def _kept_in_another_dtype(model: Any) -> dict[str, Any]:
    """Return the dtypes of parameters that transformers 5 casts to another dtype than the model's, such as T5's wo."""
    plan = model._get_dtype_plan(model.dtype) if hasattr(model, "_get_dtype_plan") else getattr(model, "dtype_plan", {})
    if not plan:
        return {}
    from transformers.core_model_loading import build_glob_alternation

    pattern, groups, _ = build_glob_alternation(list(plan))
    found = ((name, pattern.search(name)) for name, _ in model.named_parameters())
    return {name: plan[groups[match.lastgroup]] for name, match in found if match is not None}


def _bytes(quantizer: Any, model: Any, name: str, parameter: Any) -> int:
    """Count the bytes of a parameter that no linear layer holds; experts that are quantized while they are read take less."""
    element_size = getattr(quantizer, "param_element_size", None)  # from transformers 5 on
    return int(parameter.numel() * element_size(model, name, parameter)) if element_size else int(parameter.nbytes)


def _bytes_to_quantize(model: Any, quantizer: Any, units: list[Unit]) -> int:
    """Count the bytes that quantizing the largest weight takes beyond the largest layer, for which a device has room anyway.

    These are the weight as it was read, the copy in float16 from which bitsandbytes makes INT8, and the packed weight.
    """
    if quantizer.pre_quantized:
        return 0
    in_float16 = str(model.dtype) == "torch.float16"
    copies = model.dtype.itemsize + (2 if quantizer.quantization_config.load_in_8bit and not in_float16 else 0)
    weights = (weight for name, weight in model.named_parameters() if makes_parameter(quantizer, model, name))
    takes = max((copies * weight.numel() + sum(packed(weight)) for weight in weights), default=0)
    return max(0, takes - max((unit.moves for unit in units if unit.block), default=takes))


def packed(weight: Any) -> tuple[int, int]:
    """Count the bytes of the packed weights of a layer, and of the statistics that stay on its device."""
    numbers = weight.numel()
    if type(weight).__name__ == "Int8Params":
        return numbers + 4 * weight.shape[0], 0
    blocks = -(-numbers // (getattr(weight, "blocksize", None) or 64))
    tables = 16 * 4
    if getattr(weight, "compress_statistics", False):  # absmax in 8 bits, in blocks of 256 with an absmax of their own
        return -(-numbers // 2), tables + blocks + 4 * -(-blocks // 256) + 256 * 4 + 4
    return -(-numbers // 2), tables + 4 * blocks


def _units(module: Any, path: str, sizes: Sizes, blocks: set[str], listed: bool = False) -> Iterator[Unit]:
    """Yield the modules in ``module`` that go to one place: layers whose class is in ``blocks``, and all without children."""
    own = {name for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]}
    block = type(module).__name__ in blocks
    if path and (own or block or not any(True for _ in module.children())):
        inside = [size for name, size in sizes.items() if name.startswith(f"{path}.")]
        if inside or own:
            yield Unit(path, module, sum(size[0] for size in inside), sum(size[1] for size in inside), block, listed)
        return
    for name in own:
        yield Unit(name, None, 0, sum(sizes.get(name, ())), False)
    for name, child in module.named_children():
        in_list = type(module).__name__ == "ModuleList"
        yield from _units(child, f"{path}.{name}" if path else name, sizes, blocks, in_list)


def _memory(max_memory: Any) -> dict[Any, float]:
    """Return the bytes that each place may hold."""
    try:
        from transformers.integrations.accelerate import get_max_memory
    except ImportError:  # transformers 4
        from accelerate.utils import get_max_memory
    return {place: size for place, size in get_max_memory(max_memory).items() if size > 0}


def _rooms(max_memory: Any, units: list[Unit]) -> tuple[list[Room], list[Room]]:
    """Return the places where the model can compute, and the places where its layers can wait."""
    memory = _memory(max_memory)
    devices = [place for place in memory if place not in offload_map.OFFLOADED] or [p for p in memory if p == "cpu"]
    resident = [Room(place, memory[place]) for place in devices]
    if (
        max_memory is None
    ):  # then it is all the memory that is free now: activations and the layer in execution need room
        largest = max((unit.moves for unit in units), default=0)
        for room in resident:
            room.left = 0.9 * room.left - (largest if room is resident[0] else 0)
    waiting = [Room("cpu", memory["cpu"])] if "cpu" in memory and "cpu" not in devices else []
    return resident, [*waiting, Room("disk", float("inf"))]


def _place_units(units: list[Unit], sizes: Sizes, resident: list[Room], waiting: list[Room], spare: int = 0) -> Map:
    """Choose a place for each unit; if not all fit a device, leave ``spare`` bytes on each device.

    Layers that wait compute on the first device and leave their statistics there. A device that takes no unit cannot be
    that one, and then the next device is the first.
    """
    found, _ = _fill(units, sizes, _copies(resident), _copies(waiting), divides=False)
    if resident and set(found.values()).isdisjoint(offload_map.OFFLOADED):
        return found
    rooms = [Room(room.place, room.left - spare) for room in resident]
    found = _leave_room_and_fill(units, sizes, rooms, waiting)
    while len(rooms) > 1 and rooms[0].place not in found.values():
        rooms = rooms[1:]
        found = _leave_room_and_fill(units, sizes, rooms, waiting)
    return found


def _leave_room_and_fill(units: list[Unit], sizes: Sizes, rooms: list[Room], waiting: list[Room]) -> Map:
    """Choose a place for each unit, and leave room on the first device for the statistics of the layers that wait.

    Which layers wait depends on that room. So the first try leaves room for the statistics of all layers. Two more tries
    leave as much as the layers needed that waited in the try before, and more of the model fits on the device.
    """
    found, reserved = Map(), sum(unit.stays for unit in units)
    for _ in range(3):
        tried, needed = _fill(units, sizes, _copies(rooms, reserved), _copies(waiting), divides=True)
        if needed > reserved:
            break
        found, reserved = tried, needed
    return found


def _copies(rooms: list[Room], reserved: int = 0) -> list[Room]:
    """Copy ``rooms``; the first one has ``reserved`` bytes less."""
    return [Room(room.place, room.left - (reserved if room is rooms[0] else 0)) for room in rooms]


def _fill(units: list[Unit], sizes: Sizes, resident: list[Room], waiting: list[Room], divides: bool) -> tuple[Map, int]:
    """Choose a place for each unit, and count the bytes of the statistics that waiting units leave on the first device.

    Modules that the model does not repeat come first, and to the first device, where they also compute if they wait: their
    outputs are often added up. Layers go from one device to the next in order. The first that a device cannot hold is
    divided, and further ones as long as a fifth of it is free: experts that are one parameter may be too large for it.
    """
    found, statistics, rooms = Map(), 0, resident
    most = {room.place: room.left for room in resident}
    for unit in sorted(units, key=lambda unit: unit.block):
        if unit.block and divides and rooms and not _fits(unit, rooms[0]) and (unit.listed or len(resident) == 1):
            parts = _divide(unit, sizes, rooms[0], waiting)
            if parts:
                found.update(parts)
                rooms = rooms[1:] if rooms[0].left < 0.2 * most[rooms[0].place] else rooms
                continue
        possible = rooms if unit.block else resident[:1]
        at = next((at for at, room in enumerate(possible) if _fits(unit, room)), None)
        if at is None:
            statistics += unit.stays
            found.update(_wait(unit, sizes, waiting))
            continue
        possible[at].left -= unit.moves + unit.stays
        found[unit.name] = possible[at].place
        rooms = rooms[at:] if unit.block else rooms
    return found, statistics


def _divide(unit: Unit, sizes: Sizes, room: Room, waiting: list[Room]) -> Map:
    """Choose places for the parts of ``unit``, whose statistics stay in ``room``; none if no part has room beside these."""
    parts = list(_units(unit.module, unit.name, sizes, set()))
    left = room.left - sum(part.stays for part in parts)
    found = Map()
    for part in parts:
        if part.moves <= left and part.moves:
            left -= part.moves
            found[part.name] = room.place
    if left < 0 or not found:
        return Map()
    room.left = left
    for part in parts:
        if part.name not in found:
            found.update(_wait(part, sizes, waiting) if part.moves else {part.name: room.place})
    return found


def _fits(unit: Unit, room: Room) -> bool:
    return unit.moves + unit.stays <= room.left


def _wait(unit: Unit, sizes: Sizes, waiting: list[Room]) -> Map:
    """Choose where ``unit`` waits; the first layer that the CPU cannot hold is divided."""
    first, found = waiting[0], Map()
    divides = unit.block and 0 < first.left < unit.moves
    for part in _units(unit.module, unit.name, sizes, set()) if divides else [unit]:
        room = next(room for room in waiting if part.moves <= room.left)
        room.left -= part.moves
        found[part.name] = room.place
    if divides:
        first.left = 0
    return found
