"""Rewriting the source of one function: parse, match, replace, compile.

What is compiled keeps the file name, the line and column numbers, the enclosing classes (so that
``super()`` and name mangling work), the ``__future__`` flags and the free variables of the original,
so that the result can take the place of the function's ``__code__``. Python only: this module knows
nothing of the packages that are patched.
"""

from __future__ import annotations

import __future__
import ast
import difflib
import functools
import inspect
import linecache
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Union

from .edits import Rewrite

FunctionNode = Union[ast.FunctionDef, ast.AsyncFunctionDef]

_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.List, ast.Dict, ast.Set)
_OPERATIONS = (ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Attribute, ast.Subscript, ast.IfExp)
_SHARED = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)  # the parser has one node of each
_FUTURE_FLAGS = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class Conflict(Exception):
    """What is installed is not what an edit was written for. Nothing was changed."""


class Replaced(Conflict):
    """Another package has put a function of its own in the place."""


@dataclass(frozen=True)
class Source:
    """The text and syntax tree of one function as it was imported."""

    code: CodeType
    text: str
    """The function at its own lines and columns, inside the headers of its scopes."""
    depth: int
    """How many scopes (classes, functions) that are."""
    imports: tuple[ast.stmt, ...]
    """Statements to compile along with it, see :func:`_imports`."""
    lines: list[str]
    """The function's own lines, decorators included; the first is line ``code.co_firstlineno``."""
    file: list[str]
    """All lines of its file."""

    def parse(self) -> tuple[ast.Module, FunctionNode]:
        """A new syntax tree, and the function in it."""
        tree = ast.parse(self.text, self.code.co_filename)
        node: ast.AST = tree
        for _ in range(self.depth + 1):
            node = node.body[0]  # type: ignore[attr-defined]
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            raise LookupError("it is not a function definition")
        tree.body += self.imports
        return tree, node


@dataclass(frozen=True)
class _Match:
    """One place found: neighbouring nodes (one, if an expression) and what stands there instead."""

    nodes: list[ast.AST]
    replacement: list[ast.AST]
    text: str
    holder: ast.AST
    field: str


@functools.lru_cache(maxsize=512)
def read(function: FunctionType, code: CodeType) -> Source:
    """Read the source of ``function``, whose code object was ``code`` when it was imported.

    Raises
    ------
    Conflict
        There is no source, or compiling it does not give ``code``.
    """
    where = f"{function.__module__}.{function.__qualname__}"
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise Conflict(f"{where}: there is no source to read at {code.co_filename}")
    problem: Exception | None = None
    for candidate in (_guess, _exact):
        try:
            for block, imports in candidate(function, code, lines):
                text, depth = _in_scopes(block, code, function.__qualname__)
                found = Source(code, text, depth, imports, block, lines)
                if _compile(found.parse()[0], code) == code:
                    return found
            problem = None
        except (SyntaxError, IndexError, LookupError) as error:
            problem = error
    if problem:
        raise Conflict(f"{where}: its source in {code.co_filename} cannot be read: {problem}") from problem
    raise Conflict(
        f"{where}: the source in {code.co_filename} is not what was imported; "
        "the file changed since, or someone else replaced the function"
    )


def rewrite(source: Source, edits: Sequence[Rewrite]) -> CodeType:
    """The code object of ``source`` with every edit made.

    Raises
    ------
    Conflict
        An edit does not match as often as it says, or two edits touch the same nodes.
    """
    tree, function = source.parse()
    for match in _matches(function, edits):
        _replace(match)
    for edit in edits:
        if edit.signature:
            function.args.kwarg = _relocated(_keyword_arguments(edit), function)
    code = _compile(tree, source.code)
    if lost := sorted(set(source.code.co_freevars) - set(code.co_freevars)):
        # An edit took out their only use; a use that never runs keeps the closure's layout.
        use = ast.parse("if 0:\n" + "".join(f"    {name}\n" for name in lost)).body[0]
        at = 0 if ast.get_docstring(function, clean=False) is None else 1
        function.body.insert(at, _relocated(use, function.body[-1]))
        code = _compile(tree, source.code)
    if code.co_freevars != source.code.co_freevars:
        raise Conflict(
            f"{edits[0].target}: the edit would change the closure from {source.code.co_freevars} "
            f"to {code.co_freevars}"
        )
    return code


def diff(source: Source, edits: Sequence[Rewrite], path: str) -> str:
    """What ``edits`` change, as a unified diff of the file ``path``."""
    first = source.code.co_firstlineno - 1
    head, tail = source.file[:first], source.file[first + len(source.lines) :]
    after = head + _spliced(source, edits) + tail
    return "".join(difflib.unified_diff(source.file, after, f"a/{path}", f"b/{path}"))


def check(edit: Rewrite) -> None:
    """Raise ``SyntaxError`` or ``ValueError`` if the texts of ``edit`` make no sense."""
    if not edit.find and not edit.signature:
        raise ValueError(f"{edit.target}: a Rewrite needs `find` or `signature`")
    if edit.find:
        _pattern(edit.find, edit.replace)
    if edit.signature:
        _keyword_arguments(edit)


# -- reading and compiling ---------------------------------------------------------------------

_Candidate = tuple[list[str], tuple[ast.stmt, ...]]
"""The lines of a function, and what :func:`_imports` says; right if it compiles to the code that was imported."""


def _guess(function: FunctionType, code: CodeType, lines: list[str]) -> Iterator[_Candidate]:
    """Where it ends and what is imported, read from the code object and the module: nearly always right."""
    codes = _nested(code)
    ends = [end for c in codes for _, end, _, _ in getattr(c, "co_positions", tuple)() if end]  # Python 3.11
    if not ends:
        return
    block = lines[code.co_firstlineno - 1 : max(ends)]
    used = {name: function.__globals__.get(name) for c in codes for name in c.co_names}
    yield block, _import_of({name for name, value in used.items() if _is_foreign(value, function.__module__)})


def _exact(function: FunctionType, code: CodeType, lines: list[str]) -> Iterator[_Candidate]:
    """The same, read from the file: a tenth of a second for a large one."""
    block = inspect.getblock(lines[code.co_firstlineno - 1 :])
    yield block, ()
    yield block, _imports("".join(lines))


def _nested(code: CodeType) -> list[CodeType]:
    """``code`` and the code objects inside it."""
    found = [code]
    for outer in found:
        found += [const for const in outer.co_consts if isinstance(const, CodeType)]
    return found


def _is_foreign(value: object, module: str) -> bool:
    """Whether a global of ``module`` looks imported."""
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return value.__module__ != module
    return isinstance(value, ModuleType)


def _import_of(names: set[str]) -> tuple[ast.stmt, ...]:
    statement = ast.Import([ast.alias("_", name) for name in sorted(names)])
    return (ast.fix_missing_locations(statement),) if names else ()


def _in_scopes(block: list[str], code: CodeType, qualname: str) -> tuple[str, int]:
    """``block`` at its own lines and columns, under one-line headers for the scopes that ``qualname`` names.

    Returns the text and the number of scopes.
    """
    scopes: list[str] = []
    for name in qualname.split(".")[:-1]:
        if name == "<locals>":  # the scope before is a function, its locals our free variables
            outer = scopes.pop().removeprefix("class ").removesuffix(":")
            free = [n for n in code.co_freevars if n != "__class__"]
            scopes.append(f"def {outer}({', '.join(free)}):")
        else:
            scopes.append(f"class {name}:")
    indent = len(block[0]) - len(block[0].lstrip())
    if indent and not scopes:
        scopes.append("if 1:")
    if indent < len(scopes) or code.co_firstlineno <= len(scopes):
        raise SyntaxError("it does not stand inside the scopes of its name")
    padding = "\n" * (code.co_firstlineno - 1 - len(scopes))
    headers = "".join(" " * depth + header + "\n" for depth, header in enumerate(scopes))
    return padding + headers + "".join(block), len(scopes)


@functools.lru_cache(maxsize=32)
def _imports(text: str) -> tuple[ast.stmt, ...]:
    """What makes the names that a module imports known as imported where its functions are compiled alone.

    CPython (3.11.7, 3.12) compiles ``name.method()`` differently if the module imports ``name``.
    """
    names: set[str] = set()
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)
    return _import_of(names - {"*"})


def _compile(tree: ast.Module, like: CodeType) -> CodeType:
    """Compile ``tree``, and take out the code object that stands where ``like`` stood."""
    flags = like.co_flags & _FUTURE_FLAGS
    pending = [compile(tree, like.co_filename, "exec", flags=flags, dont_inherit=True)]
    while pending:
        for const in pending.pop().co_consts:
            if isinstance(const, CodeType):
                if const.co_name == like.co_name and const.co_firstlineno == like.co_firstlineno:
                    return const
                pending.append(const)
    raise LookupError(f"no function {like.co_name} at line {like.co_firstlineno}")


# -- matching ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _pattern(find_text: str, replace_text: str) -> tuple[tuple[ast.AST, ...], bool]:
    """What to find, and whether it is an expression that gives way to another; else it is statements."""
    find, replace = (ast.parse(textwrap.dedent(text)).body for text in (find_text, replace_text))
    if all(len(side) == 1 and isinstance(side[0], ast.Expr) for side in (find, replace)):
        return (find[0].value,), True
    return tuple(find), False


def _replacement(edit: Rewrite) -> list[ast.AST]:
    """New nodes to put there."""
    body: list = ast.parse(textwrap.dedent(edit.replace)).body or [ast.Pass()]
    return [body[0].value] if _pattern(edit.find, edit.replace)[1] else body


def _same(a: object, b: object) -> bool:
    """Whether two syntax trees are equal but for positions and for load, store or delete."""
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, ast.AST):
        return type(a) is type(b) and a == b
    return type(a) is type(b) and all(
        _same(getattr(a, name, None), getattr(b, name, None))
        for name in a._fields
        if name not in ("ctx", "type_comment", "kind")
    )


_Place = tuple[list, int, ast.AST, str]
"""A node: the list that it is in, its index there, and the node and the field that hold them."""


def _places(function: FunctionNode) -> dict[type, list[_Place]]:
    """Every node in the body of ``function``, by type: nearly all are of another type than what is looked for."""
    places: dict[type, list[_Place]] = {}
    pending: list[ast.AST] = [function]
    while pending:
        holder = pending.pop()
        for field in ("body",) if holder is function else holder._fields:
            value = getattr(holder, field, None)
            children = value if isinstance(value, list) else [value]
            for at, child in enumerate(children):
                if isinstance(child, ast.AST) and not isinstance(child, _SHARED):
                    places.setdefault(type(child), []).append((children, at, holder, field))
                    pending.append(child)
    return places


def _matches(function: FunctionNode, edits: Sequence[Rewrite]) -> list[_Match]:
    claimed: dict[int, Rewrite] = {}
    matches = []
    places = _places(function)
    for edit in edits:
        if not edit.find:
            continue
        find = list(_pattern(edit.find, edit.replace)[0])
        runs = [(nodes[at : at + len(find)], *held) for nodes, at, *held in places.get(type(find[0]), ())]
        found = [run for run in runs if _same(find, run[0])]
        if len(found) != edit.count:
            raise Conflict(
                f"{edit.target}: {_brief(edit.find)} stands there {len(found)} times, expected {edit.count}"
            )
        for nodes, holder, field in found:
            inside = {id(n) for node in nodes for n in ast.walk(node) if not isinstance(n, _SHARED)}
            if other := next((claimed[i] for i in inside if i in claimed), None):
                raise Conflict(f"{edit.target}: {_brief(edit.find)} overlaps {_brief(other.find)}")
            claimed.update(dict.fromkeys(inside, edit))
            matches.append(_Match(nodes, _replacement(edit), edit.replace, holder, field))
    return matches


def _brief(text: str) -> str:
    """``text`` on one line, in quotes, for a message."""
    return repr(textwrap.shorten(" ".join(text.split()), 80))


# -- replacing ---------------------------------------------------------------------------------


def _replace(match: _Match) -> None:
    for node in match.replacement:
        _relocated(node, match.nodes[0], match.nodes[-1])
    value = getattr(match.holder, match.field)
    if isinstance(value, list):
        at = next(i for i, node in enumerate(value) if node is match.nodes[0])
        value[at : at + len(match.nodes)] = match.replacement
    else:
        setattr(match.holder, match.field, match.replacement[0])
    context = getattr(match.nodes[0], "ctx", None)
    if context is not None and hasattr(match.replacement[0], "ctx"):
        match.replacement[0].ctx = context


def _relocated(node: ast.AST, first: ast.AST, last: ast.AST | None = None) -> ast.AST:
    """Give ``node`` and all below it the position of what it replaces."""
    last = last or first
    for child in ast.walk(node):
        if "lineno" in child._attributes:
            child.lineno, child.col_offset = first.lineno, first.col_offset  # type: ignore[attr-defined]
            child.end_lineno, child.end_col_offset = last.end_lineno, last.end_col_offset  # type: ignore
    return node


def _keyword_arguments(edit: Rewrite) -> ast.arg:
    """The ``**name`` of ``edit.signature``; nothing else can be added to a signature."""
    arguments = ast.parse(f"def f({edit.signature}): pass").body[0].args  # type: ignore[attr-defined]
    if arguments.kwarg is None or len(list(ast.iter_child_nodes(arguments))) != 1:
        raise ValueError(f"{edit.target}: signature must be '**name', not {edit.signature!r}")
    return arguments.kwarg


def _spliced(source: Source, edits: Sequence[Rewrite]) -> list[str]:
    """The lines of ``source`` with the edits made in the text, for people to read."""
    _, function = source.parse()
    first = source.code.co_firstlineno
    lines = [line.encode() for line in source.lines]
    spans = []
    for match in _matches(function, edits):
        start, end = match.nodes[0], match.nodes[-1]
        text = textwrap.dedent(match.text).strip("\n") or "pass"
        if isinstance(start, ast.stmt):
            text = text.replace("\n", "\n" + " " * start.col_offset)
        elif isinstance(match.holder, _OPERATIONS) and not isinstance(match.replacement[0], _ATOMS):
            text = f"({text})"
        spans.append((start.lineno, start.col_offset, end.end_lineno, end.end_col_offset, text))
    for edit in edits:
        if edit.signature:
            line, column, before = _end_of_parameters(function)
            spans.append((line, column, line, column, before + edit.signature))
    for line, column, end_line, end_column, text in sorted(spans, reverse=True):
        head, tail = lines[line - first][:column], lines[end_line - first][end_column:]
        lines[line - first : end_line - first + 1] = [head + text.encode() + tail]
    return "".join(line.decode() for line in lines).splitlines(keepends=True)


def _end_of_parameters(function: FunctionNode) -> tuple[int, int, str]:
    """Line and column after the last parameter, and the comma that a further one needs."""
    known = [n for n in ast.walk(function.args) if isinstance(n, (ast.arg, ast.expr))]
    if known:
        line, column = max((n.end_lineno, n.end_col_offset) for n in known)
        return line, column, ", "
    name_at = function.col_offset + len("def ") + len(function.name) + 1
    return function.lineno, name_at, ""
