"""Where a name of a library is defined, found in its source files alone."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from patches.engine import definitions

_MAX_HOPS = 8  # of imports from one file to the next


class Names:
    """The names of the libraries whose source files ``text`` gives, by the name of the module; None for no such module."""

    def __init__(self, text: Callable[[str], str | None]) -> None:
        self._text = text
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        """Return the syntax tree of a module; None if there is none of that name."""
        if module not in self._trees:
            text = self._text(module)
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def resolve(self, module: str, path: str) -> str | None:
        """Return ``"module:name"`` of the definition that ``path`` in ``module`` leads to; None for a module or nothing."""
        first, _, rest = path.partition(".")
        for _ in range(_MAX_HOPS):
            tree = self.tree(module)
            if tree is None or not first:
                return None
            if next(definitions.find(tree, first), None) is not None:
                return f"{module}:{first}.{rest}" if rest else f"{module}:{first}"
            if self.tree(f"{module}.{first}") is not None:
                module, (first, _, rest) = f"{module}.{first}", rest.partition(".")
                continue
            found = self._imported(module, tree, first)
            if found is None:
                return None
            module, name = found
            if not name:
                first, _, rest = rest.partition(".")
            else:
                first = name
        return None

    def _imported(self, module: str, tree: ast.Module, name: str, hops: int = _MAX_HOPS) -> tuple[str, str] | None:
        """Return the module and the name there that ``name`` is imported from; an empty name for the module itself."""
        stars = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return alias.name, ""
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(module, node)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        whole = f"{origin}.{alias.name}"
                        if self.tree(whole) is not None:
                            return whole, ""
                        if self.tree(origin) is not None:  # else it may be tried, and another one is taken instead
                            return origin, alias.name
                    if alias.name == "*":
                        stars.append(origin)
        for origin in stars:
            there = self.tree(origin)
            if there is not None and (
                next(definitions.find(there, name), None) is not None
                or (hops and self._imported(origin, there, name, hops - 1) is not None)
            ):
                return origin, name
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module if self.tree(f"{module}.__init__") is not None else module.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        return f"{package}.{node.module}" if node.module else package

    def members(self, module: str) -> Iterator[tuple[str, str]]:
        """Give what a module and its classes define, without the classes: the last name, and ``"module:name"``."""
        tree = self.tree(module)
        for each in definitions.definitions(tree) if tree is not None else ():
            prefix, inside = f"{module}:", [each]
            if isinstance(each, ast.ClassDef):
                prefix, inside = f"{module}:{each.name}.", list(definitions.definitions(each))
            for inner in inside:
                if not isinstance(inner, ast.ClassDef):
                    yield from ((name, f"{prefix}{name}") for name in definitions.names_of(inner))
