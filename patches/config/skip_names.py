"""The names to give a library for those of ``llm_int8_skip_modules``, so that each skips the modules whose path contains it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..process.messages import LOGGER
from .skip_list import path_up_to

if TYPE_CHECKING:
    from torch.nn import Module


class Rule(NamedTuple):
    """How a library compares the names of the list with the paths of layers."""

    skips: Callable[[str, str], bool]
    """Tells whether the library skips for a name the layer at a path."""
    by_chance: Callable[[str, str, list[str]], bool]
    """Tells whether it does so without reason: given a name, a path and the paths that contain the name as components."""


def names_for(rule: Rule, names: Iterable[str], paths: list[str]) -> list[str]:
    """Return ``names`` and the paths that the library would not find by them; of a name that finds too much, paths alone."""
    return list(dict.fromkeys(each for name in names for each in _with_paths(rule, name, paths)))


def _with_paths(rule: Rule, name: str, paths: list[str]) -> list[str]:
    meant = [path for path in paths if path_up_to(path, name)]
    taken = [path for path in paths if rule.skips(name, path)]
    if any(rule.by_chance(name, path, meant) for path in taken):
        return [path for path in paths if path in meant or path in taken and not rule.by_chance(name, path, meant)]
    roots = {path_up_to(path, name) for path in meant if path not in taken}
    # A root may take a neighbour with it: then each layer is named.
    if any(rule.skips(root, path) for root in roots for path in paths if path not in meant):
        roots = set(meant)
    return [name, *sorted(roots)]


def warn_of_unknown(rule: Rule, names: Iterable[str], model: Module, paths: list[str]) -> None:
    """Log which of ``names`` is about no module of ``model``."""
    modules = [path for path, _ in model.named_modules() if path]
    modules += [path for path, parameter in model.named_parameters() if parameter.dim() == 3]  # experts
    parts = {".".join(path.split(".")[at:]) for path in modules for at in range(path.count(".") + 1)}
    for name in names:
        if any(path_up_to(path, name) for path in modules) or any(rule.skips(name, path) for path in paths):
            continue
        near = difflib.get_close_matches(name, sorted(parts), n=3, cutoff=0.5)
        LOGGER.warning(
            "llm_int8_skip_modules contains %r, but this %s has no module of that name, so it skips nothing.%s",
            name,
            type(model).__name__,
            f" The nearest: {', '.join(near)}." if near else "",
        )
