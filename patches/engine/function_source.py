"""Reading the source of one function, and compiling it again to the very code object that was imported.

Compiled code keeps the file name, the line and column numbers, the enclosing classes (so that
``super()`` and name mangling work), the ``__future__`` flags and the free variables of the original.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import inspect
import linecache
import re
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import NamedTuple

from .frames import with_nested_code

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_TOP_LEVEL_NAME = re.compile(r"^(?:(?:async )?def |class )?(\w+)", re.MULTILINE)
"""The names that the lines of a file define at its top level, and a few words more."""
_FUTURE_FLAGS = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class Conflict(Exception):
    """The installed code differs from the code that an edit was written for. Nothing was changed."""


class Replaced(Conflict):
    """Another package has put a function of its own in the place."""


class Source(NamedTuple):
    """The text of one function as it was imported."""

    code: CodeType
    text: str
    """The function at its own lines and columns, inside the headers of its scopes."""
    scopes: int
    """The number of scopes (classes, functions) around it."""
    imports: tuple[ast.stmt, ...]
    """Statements to compile along with it, see :func:`_imports_in_file`: CPython compiles calls of methods of imported names
    differently."""
    function_lines: list[str]
    """The function's own lines, decorators included; the first is line ``code.co_firstlineno``."""
    file_lines: list[str]
    """All lines of its file."""
    spare_tree: dict[str, tuple[ast.Module, FunctionNode]]
    """Under "tree" the one that the source was checked with, until a caller takes it: parsing takes as long as compiling."""

    def parse(self) -> tuple[ast.Module, FunctionNode]:
        """Return a syntax tree that no other caller has, and the function in it."""
        if spare := self.spare_tree.pop("tree", None):
            return spare
        tree = ast.parse(self.text, self.code.co_filename)
        node: ast.AST = tree
        for _ in range(self.scopes + 1):
            node = node.body[0]  # type: ignore[attr-defined]
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            raise LookupError("it is not a function definition")
        tree.body += self.imports
        return tree, node


def read_source(function: FunctionType, code: CodeType) -> Source:
    """Read the source of ``function``, whose code object was ``code`` when it was imported.

    Raises
    ------
    Conflict
        There is no source, or compiling it does not give ``code``.
    """
    key = (code, code.co_filename, function.__qualname__)  # not the function, which would be kept alive
    if (source := _sources.get(key)) is None:
        if len(_sources) >= _MAX_SOURCES:
            _sources.clear()
        source = _sources[key] = _find_source(function, code)
    return source


_sources: dict[tuple[CodeType, str, str], Source] = {}
_MAX_SOURCES = 512


def forget_sources() -> None:
    """Read every source again when it is next asked for."""
    _sources.clear()


def _find_source(function: FunctionType, code: CodeType) -> Source:
    where = f"{function.__module__}.{function.__qualname__}"
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise Conflict(f"{where}: no source file at {code.co_filename}")
    problem: Exception | None = None
    for find_lines in (_guess_lines, _read_lines):
        try:
            for block, imports in find_lines(function, code, lines):
                text, scopes = _in_scopes(block, code, function.__qualname__)
                found = Source(code, text, scopes, imports, block, lines, {})
                parsed = found.parse()
                if compile_like(parsed[0], code) == code:
                    found.spare_tree["tree"] = parsed
                    return found
            problem = None
        except (SyntaxError, IndexError, LookupError) as error:
            problem = error
    if problem:
        raise Conflict(f"{where}: its source in {code.co_filename} cannot be read: {problem}") from problem
    raise Conflict(
        f"{where}: the source in {code.co_filename} differs from the imported code: "
        "the file changed after the import, or another program replaced the function"
    )


_Candidate = tuple[list[str], tuple[ast.stmt, ...]]
"""The lines of a function and its imports (:func:`_imports_in_file`); right if they compile to the code that was imported."""


def _guess_lines(function: FunctionType, code: CodeType, lines: list[str]) -> Iterator[_Candidate]:
    """Guess its last line and its imports from the code object and the module, nearly always right."""
    codes = with_nested_code(code)
    last = max((line or 0 for c in codes for _, _, line in c.co_lines()), default=0) or code.co_firstlineno
    block = _until_dedent(lines, code.co_firstlineno - 1, last)
    used = {name: function.__globals__.get(name) for c in codes for name in c.co_names}
    yield (
        block,
        _import_statement({name for name, value in used.items() if _looks_imported(value, function.__module__)}),
    )
    # Else take every name for imported that is no local, no builtin, and not defined at the top level of the file.
    own = {name for c in codes for name in (*c.co_varnames, *c.co_cellvars)}.union(
        _TOP_LEVEL_NAME.findall("".join(lines))
    )
    yield block, _import_statement({name for name in used if name not in own and not hasattr(builtins, name)})


def _until_dedent(lines: list[str], first: int, last: int) -> list[str]:
    """Return the lines of the definition at the index ``first``, without comments and blank lines at its end.

    ``last`` is the line in which its last statement begins. The first line after it that is indented less ends it.
    """
    indent, end = _indent(lines[first]), last
    for at in range(last, len(lines)):
        text = lines[at].strip()
        if text and _indent(lines[at]) <= indent:
            break
        if text and not text.startswith("#"):
            end = at + 1
    return lines[first:end]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _read_lines(function: FunctionType, code: CodeType, lines: list[str]) -> Iterator[_Candidate]:
    """Read its last line and its imports from the file: a tenth of a second for a large one."""
    block = inspect.getblock(lines[code.co_firstlineno - 1 :])
    yield block, ()
    yield block, _imports_in_file("".join(lines))


def _looks_imported(value: object, module: str) -> bool:
    """Tell whether a global of ``module`` looks imported."""
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return value.__module__ != module
    return isinstance(value, ModuleType)


def _import_statement(names: set[str]) -> tuple[ast.stmt, ...]:
    statement = ast.Import([ast.alias("_", name) for name in sorted(names)])
    return (ast.fix_missing_locations(statement),) if names else ()


def _in_scopes(block: list[str], code: CodeType, qualname: str) -> tuple[str, int]:
    """Put ``block`` at its own lines and columns, under one-line headers for the scopes that ``qualname`` names.

    Returns the text and the number of scopes.
    """
    scopes: list[str] = []
    for name in qualname.split(".")[:-1]:
        if name == "<locals>":  # the name before is a function: give its header our free variables as parameters
            outer = scopes.pop().removeprefix("class ").removesuffix(":")
            free = [n for n in code.co_freevars if n != "__class__"]
            scopes.append(f"def {outer}({', '.join(free)}):")
        else:
            scopes.append(f"class {name}:")
    indent = _indent(block[0])
    if indent and not scopes:
        scopes.append("if 1:")  # it is indented at the top level, as below `try` or `if`
    if indent < len(scopes) or code.co_firstlineno <= len(scopes):
        raise SyntaxError("the function is not nested in the scopes that its qualified name gives")
    padding = "\n" * (code.co_firstlineno - 1 - len(scopes))
    headers = "".join(" " * depth + header + "\n" for depth, header in enumerate(scopes))
    return padding + headers + "".join(block), len(scopes)


@functools.lru_cache(maxsize=32)
def _imports_in_file(text: str) -> tuple[ast.stmt, ...]:
    """Make import statements for the names that a module imports, to compile one of its functions alone.

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
    return _import_statement(names - {"*"})


def compile_like(tree: ast.Module, like: CodeType) -> CodeType:
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
