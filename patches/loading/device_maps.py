"""Where ``from_pretrained`` puts each module of a quantized model that does not fit, and where each of them computes.

A device map of a user names modules inside one another, single parameters, and devices in three notations. Loading
and accelerate's hooks read such a map differently. An ``OffloadMap`` says the same in the one form that both read alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..config.quantizers import is_bitsandbytes
from ..offload.offload_map import (
    OFFLOADED,
    OffloadMap,
    Place,
    execution_device,
    find_enclosing,
    is_offloaded_place,
    to_torch_device,
)
from . import split_layers

if TYPE_CHECKING:
    from torch.nn import Module


def offloads_something(device_map: Any) -> bool:
    """Tell whether ``device_map`` sends something to the CPU or the disk beside modules that stay where they compute."""
    return isinstance(device_map, Mapping) and _any_offloaded(device_map.values())


def _any_offloaded(values: Iterable[Place]) -> bool:
    places = set(values)
    return places != {"cpu"} and not places.isdisjoint(OFFLOADED)


def supports_offload(quantizer: Any) -> bool:
    """Tell whether ``quantizer`` makes a model whose layers can be offloaded quantized, and is not asked to leave them."""
    if not is_bitsandbytes(quantizer):
        return False
    config = quantizer.quantization_config
    if config.llm_int8_enable_fp32_cpu_offload or config.llm_int8_has_fp16_weight:
        return False
    from transformers.integrations import is_deepspeed_zero3_enabled
    from transformers.modeling_utils import is_fsdp_enabled

    return not is_fsdp_enabled() and not is_deepspeed_zero3_enabled()  # these dispatch no model


def is_refused(quantizer: Any, values: set[Place]) -> bool:
    """Tell ``validate_environment`` whether to refuse a model with such ``values`` in its device map."""
    return not supports_offload(quantizer) and _any_offloaded(values)


def plan_device_map(model: Module, device_map: Any, quantizer: Any) -> Any:
    """Make an ``OffloadMap`` of ``device_map`` if ``model`` is to be offloaded quantized; else return it as it is."""
    if not offloads_something(device_map) or not supports_offload(quantizer):
        return device_map
    _refuse_unknown_names(model, device_map)
    _refuse_unknown_places(device_map)
    given, device_map = device_map, {**device_map, **_places_of_shared(model, device_map)}
    main = execution_device(device_map)
    found = dict(_make_disjoint(model, "", device_map, main, inside=False))
    # By where modules go, not by the given map: one with tensors of its own takes a tied weight along (Zaya).
    found = dict(_make_disjoint(model, "", {**found, **_places_of_tied(model, found, main)}, main, inside=False))
    result = OffloadMap(found, given)
    result.devices_of_split_layers = split_layers.devices_of_split_layers(model, result)
    return result


def skip_tied_check(upstream: Callable[..., None], device_map: Any, quantizer: Any) -> Callable[..., None]:
    """Return ``check_tied_parameters_on_same_device``, or nothing to do where :func:`plan_device_map` checks the map."""
    return (lambda *_: None) if offloads_something(device_map) and supports_offload(quantizer) else upstream


def _places_of_shared(model: Module, device_map: Mapping[str, Place]) -> dict[str, Place]:
    """Choose one place for a module that has several names: the place of a name that the map has, or of the first name."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if _has_own(module):
            names.setdefault(id(module), []).append(path)
    found = {}
    for paths in names.values():
        said = find_enclosing(device_map, next((path for path in paths if path in device_map), paths[0]))
        if len(paths) > 1 and said is not None:
            found.update(dict.fromkeys(paths, device_map[said]))
    return found


def _places_of_tied(model: Module, device_map: Mapping[str, Place], main: Place) -> dict[str, Place]:
    """Choose one place for modules that share a weight: a device of theirs, first of all ``main``, or where the source waits.

    If the source is on the disk, all are.
    """
    groups: dict[str, list[str]] = {}
    for name, source in tied_names(model).items():
        groups.setdefault(source, [source]).append(name)
    found = {}
    for source, names in groups.items():
        given = {name: device_map[at] for name in names if (at := find_enclosing(device_map, name)) is not None}
        resident = sorted(
            (at for at in given.values() if not is_offloaded_place(at)),
            key=lambda at: to_torch_device(at) != to_torch_device(main),
        )
        place = "disk" if given.get(source) == "disk" else next(iter(resident), given.get(source))
        if place is not None and len({str(each) for each in given.values()}) > 1:
            found.update({name.rpartition(".")[0]: place for name in given})
    return found


def tied_names(model: Any) -> dict[str, str]:
    """Return for each tied weight the name of its source. In transformers 4 both are one parameter by now."""
    declared: dict[str, str] | None = getattr(model, "all_tied_weights_keys", None)
    if declared is not None:
        return declared
    first: dict[int, str] = {}
    names = ((name, first.setdefault(id(each), name)) for name, each in model.named_parameters(remove_duplicate=False))
    return {name: source for name, source in names if name != source}


def _refuse_unknown_names(model: Module, device_map: Mapping[str, Place]) -> None:
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known.update(name for name, _ in _tensors(model, ""))
    unknown = [name for name in device_map if name not in known]
    if unknown:
        import difflib

        near = difflib.get_close_matches(unknown[0], list(known), n=3)
        raise ValueError(
            f"The device_map names {', '.join(map(repr, unknown))}, which {type(model).__name__} does not have"
            + (f"; the nearest names are {', '.join(map(repr, near))}" if near else "")
            + ". `for name, _ in model.named_modules()` shows all that it has."
        )


def _refuse_unknown_places(device_map: Mapping[str, Place]) -> None:
    for name, place in device_map.items():
        try:
            known, cause = is_offloaded_place(place) or to_torch_device(place).type != "meta", None
        except (RuntimeError, TypeError) as error:
            known, cause = False, error
        if not known:
            raise ValueError(
                f"The device_map sends {name!r} to {place!r}, which is not a place. Places, also as keys of `max_memory`, are "
                f'"cpu", "disk" and the devices that torch finds here: {_devices()}.'
            ) from cause


def _devices() -> str:
    """Name the devices of this machine that a device map can name."""
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return ", ".join(map(str, range(count))) or "none"


def _make_disjoint(
    module: Module, path: str, given: Mapping[str, Place], main: Place, inside: bool
) -> Iterator[tuple[str, Place]]:
    """Yield places for the modules in ``module``, none inside another; ``inside``: a name in ``given`` has ``module``."""
    inside = inside or path in given
    places = [_place_of_tensor(name, given, main, required) for name, required in _tensors(module, path)]
    whole = inside and len({str(place) for place in places}) == 1
    if places and path and (whole or _has_own(module)):
        yield path, _place_of(module, path, given, places)
        return
    if not path:
        for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            place = _place_of_tensor(name, given, main)
            yield name, main if is_offloaded_place(place) else place  # no hook brings the model's own tensors
        if whole and not _has_own(module):
            yield "", places[0]
            return
    for name, child in module.named_children():
        yield from _make_disjoint(child, _join(path, name), given, main, inside)


def _has_own(module: Module) -> bool:
    return any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))


def _place_of(module: Module, path: str, given: Mapping[str, Place], places: list[Place]) -> Place:
    """Choose one place for a module whose own tensors accelerate's hook brings together, with all modules inside it.

    Of several places it is the one that takes the least memory: a tensor on the disk may not fit elsewhere.
    """
    own = [given[_join(path, name)] for name, _ in module.named_parameters(recurse=False) if _join(path, name) in given]
    for waiting in reversed(OFFLOADED):
        if waiting in [place for place in (*own, *places) if isinstance(place, str)]:
            return waiting
    return own[0] if own else places[0]


def _tensors(module: Module, path: str) -> Iterator[tuple[str, bool]]:
    """Yield the names of all tensors in ``module``, and whether a device map must have them."""
    for prefix, part in module.named_modules(prefix=path, remove_duplicate=False):
        for name in part._parameters:
            if part._parameters[name] is not None:
                yield _join(prefix, name), True
        for name in part._buffers:
            if part._buffers[name] is not None:
                yield _join(prefix, name), name not in part._non_persistent_buffers_set


def _place_of_tensor(name: str, given: Mapping[str, Place], main: Place, required: bool = True) -> Place:
    found = find_enclosing(given, name)
    if found is not None:
        return given[found]
    if required:
        raise ValueError(
            f"The device_map has no entry for {name!r}. Add one for {name.rpartition('.')[0] or name!r} or a module that "
            'contains it; an entry {"": 0} places everything that no other entry names.'
        )
    return main


def owner_of_tensor(model: Module, name: str) -> Module:
    """Return the module that has the tensor ``name``; ``get_submodule`` takes ten times as long."""
    found: Any = model
    for part in name.split(".")[:-1]:
        found = found._modules[part]
    return found  # type: ignore[no-any-return]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
