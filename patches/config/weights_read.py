"""Which linear layers must stay in floating point, because the code of the model reads their weight."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module


def by_class(readers: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Return the layers of each class, from pairs of names of classes and names of layers."""
    return {kind: tuple(layers.split()) for kinds, layers in readers for kind in kinds.split()}


def find_layers_read(
    model: Module, readers: Mapping[str, tuple[str, ...]], config: Any, linear_layers: Iterable[str]
) -> list[str]:
    """Return those of ``linear_layers`` of ``model`` whose weight, packed as ``config`` says, the installed code cannot read.

    ``readers`` are classes, with the name of their file where others have the same, and their layers whose weight they read.
    """
    floating = config.load_in_4bit and config.bnb_4bit_quant_storage.is_floating_point
    packed = "int8" if config.load_in_8bit else "floating" if floating else "uint8"
    return sorted(_read(model, readers, packed, set(linear_layers)))


def _read(model: Module, readers: Mapping[str, tuple[str, ...]], packed: str, layers: set[str]) -> Iterator[str]:
    for path, module in model.named_modules():
        kind: Any = type(module)
        file = kind.__module__.rpartition(".")[2]
        for name in readers.get(kind.__name__, readers.get(f"{file}.{kind.__name__}", ())):
            full = f"{path}.{name}" if path else name
            if full in layers and packed in _lost_for(kind, name):
                yield full


@functools.cache
def _lost_for(kind: Any, name: str) -> frozenset[str]:
    """Return the ways to store packed weights in which the methods of ``kind`` cannot read ``self.name.weight``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    text = ast.unparse(tree)
    # Some cast to the dtype of the first parameter of a part: Swin v2 a table of positions, AnyFlow steps of time.
    part = f"self.{name.rpartition('.')[0]}.parameters()"
    first = (f"next({part}).dtype", f"next(iter({part})).dtype")
    lost = {"uint8", "int8"} if "." in name and any(each in text for each in first) else set()
    for method in tree.body[0].body:  # type: ignore[attr-defined]
        if isinstance(method, ast.FunctionDef) and "init" not in method.name:
            lost |= _lost_in(method, ast.unparse(method), re.sub(r"\.(\d+)\b", r"[\1]", f"self.{name}.weight"))
    return frozenset(lost)


def _lost_in(method: ast.FunctionDef, text: str, weight: str) -> set[str]:
    lost: set[str] = set()
    owners = {child: node for node in ast.walk(method) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(method):
        if not isinstance(node, ast.Attribute) or ast.unparse(node) != weight:
            continue
        owner = owners[node]
        if not isinstance(owner, ast.Attribute) or owner.attr in ("t", "type", "unsqueeze", "view", "chunk", "reshape"):
            if not (isinstance(owner, ast.Call) and ast.unparse(owner.func) == "isinstance"):
                lost |= {"uint8", "int8", "floating"}
        elif owner.attr == "dtype" and _casts(owners[owner], owners):
            lost |= {kind for kind in ("uint8", "int8") if f"{weight}.dtype != torch.{kind}" not in text}
        elif owner.attr == "dtype" and _prefers_compute_dtype(owners[owner], text):
            lost |= {"int8"}  # such a layer has no compute_dtype: nothing is cast
    return lost


def _prefers_compute_dtype(node: ast.AST, text: str) -> bool:
    """Tell whether a name is assigned at ``node``, and compute_dtype is taken where it is not floating."""
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return isinstance(target, ast.Name) and f"if {target.id}.is_floating_point:" in text and "compute_dtype" in text


def _casts(node: ast.AST, owners: dict[ast.AST, ast.AST]) -> bool:
    """Tell whether something is cast to the dtype at ``node``."""
    call = owners[node] if isinstance(node, ast.keyword) else node
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "to"
