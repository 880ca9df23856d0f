"""Which definitions of a library a patch rests on: what its edits name, and what its own code takes or reads by name."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from patches.engine import definitions
from patches.engine.patch import Part
from patches.newer_releases.source_table import is_in

from . import own_code
from .names import Names

_CONTAINERS = (dict, list, tuple, set, str, bytes)
_MAKES_INSTANCES = ("__init__", "__new__", "__post_init__")


def rests_on(part: Part, names: Names, package: str = "") -> set[str]:
    """Return the definitions of a package that ``part`` rests on, as ``"module:name"``, in the release of ``names``.

    The package is by default the one that the part repairs. The part's edits are in it whether the release has their targets or not. What our code reads of an object is looked for in
    the modules that the patch edits or imports from, but for what tensors and containers have: it reads that of these.
    A patch that only adds to classes, and reads nothing of the package, rests on all of these classes. A patch that does
    neither is about what its reproducer imports.
    """
    package = package or part.package
    edited = {edit.target for edit in part.edits if is_in(package, edit.target)}
    used = own_code.of_patch(part)
    if package == part.package and not edited and not any(is_in(package, module) for module, _ in used.imported):
        used = used._replace(imported=used.imported | own_code.uses((), [part.defect]).imported)
    taken = {(module, path) for module, path in used.imported if is_in(package, module)}
    found = {_defined(names, target) for target in (names.resolve(*each) for each in taken) if target}
    for target in filter(None, (names.resolve(*each) for each in used.called if is_in(package, each[0]))):
        found |= {f"{target}.{method}" for method in _MAKES_INSTANCES if _is_class(names, target)}
    modules = {name.partition(":")[0] for name in (*edited, *found)}
    modules |= {module for module, path in taken if names.tree(module) is not None and not path}
    for module in modules:
        found |= {whole for name, whole in names.members(module) if name in used.attributes - _of_values()}
    if not any(_is_defined(names, each) for each in edited | found):
        found |= {whole for target in edited for whole in _around(names, target)}
    return edited | found


def _around(names: Names, target: str) -> Iterator[str]:
    """Give a class with all its members for what is not in it; for the kernel of an operator all that have no name."""
    module, _, path = target.partition(":")
    owner = f"{module}:{path.rpartition('.')[0]}"
    if _is_class(names, owner):
        yield owner
        yield from (whole for _, whole in names.members(module) if whole.startswith(f"{owner}."))
    else:
        yield f"{module}:_"


def _is_defined(names: Names, target: str) -> bool:
    module, _, path = target.partition(":")
    tree = names.tree(module)
    return tree is not None and next(definitions.find(tree, path), None) is not None


@functools.cache
def _of_values() -> frozenset[str]:
    """Return the attributes of tensors and containers."""
    import torch

    return frozenset(dir(torch.Tensor)).union(*map(dir, _CONTAINERS))


def _is_class(names: Names, target: str) -> bool:
    module, _, path = target.partition(":")
    tree = names.tree(module)
    return tree is not None and any(isinstance(each, ast.ClassDef) for each in definitions.find(tree, path))


def _defined(names: Names, target: str) -> str:
    """Cut what is read of an object off a name: ``module:Class.method`` of ``module:Class.method.__doc__``."""
    module, _, path = target.partition(":")
    tree = names.tree(module)
    assert tree is not None
    while next(definitions.find(tree, path), None) is None:
        path = path.rpartition(".")[0]
    return f"{module}:{path}"
