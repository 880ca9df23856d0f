"""Names for operators that say which code is behind them.

torch keeps compiled graphs on disk and finds one again by what Dynamo saw of it: the names and arguments
of operators, not what they do or expand to. Under a name that stays, a graph made by one version of this
package, or of bitsandbytes, is found by the next, and a repair in an operator never reaches who has a warm
cache. So the name carries a digest: of the functions given, of every function and class of the two packages
that their code names, as installed and patched by then, and of the release of bitsandbytes. It is one of
bytecode, for frozen applications have no source; another release of Python gives another one.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import bitsandbytes

_PACKAGES = (__name__.partition(".")[0], "bitsandbytes")
_PLAIN = (str, bytes, int, float, complex, type(None), type(...))


def versioned_name(name: str, *behind: Callable[..., Any]) -> str:
    """``name`` with a digest of the code of ``behind``, and of all code of the two packages that it reaches."""
    digest = hashlib.sha256(bitsandbytes.__version__.encode())
    for text in sorted(map(_described, _reached(behind))):
        digest.update(text.encode())
    return f"{name}_{digest.hexdigest()[:16]}"


def _reached(roots: Iterable[Any]) -> list[FunctionType]:
    """The functions among ``roots`` and what they name, by and by."""
    seen: dict[int, Any] = {}
    pending = list(roots)
    while pending:
        thing = pending.pop()
        thing = inspect.unwrap(getattr(thing, "__func__", thing))  # static and class methods, then wrappers
        if id(thing) in seen:
            continue
        if isinstance(thing, FunctionType):
            pending += _named_by(thing)
        elif isinstance(thing, type):
            pending += (value for base in thing.__mro__ if _is_ours(base) for value in vars(base).values())
        elif isinstance(thing, property):
            pending += (part for part in (thing.fget, thing.fset) if part is not None)
        seen[id(thing)] = thing
    return [thing for thing in seen.values() if isinstance(thing, FunctionType)]


def _named_by(function: FunctionType) -> Iterator[Any]:
    """Functions and classes of the two packages that the code of ``function`` names, alone or in a module."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    known = {**sys.modules, **function.__globals__}
    for value in (known[name] for name in names if name in known):
        members = (vars(value)[name] for name in names if name in vars(value)) if _is_module(value) else (value,)
        yield from (member for member in members if _is_ours(member))


def _is_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] in _PACKAGES


def _is_ours(value: Any) -> bool:
    """Whether it is a function or class (or a wrapper of one) that one of the two packages defines."""
    module = getattr(value, "__module__", None) if callable(value) else None
    return isinstance(module, str) and module.partition(".")[0] in _PACKAGES


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _described(function: FunctionType) -> str:
    """Its code, its defaults and the plain values that it names, the same in every process."""
    known = function.__globals__
    names = sorted({name for code in _codes(function.__code__) for name in code.co_names})
    plain = [(name, known[name]) for name in names if isinstance(known.get(name, known), _PLAIN)]
    defaults = (function.__defaults__, sorted((function.__kwdefaults__ or {}).items()))
    return f"{function.__qualname__} {_text(function.__code__)} {_text(defaults)} {_text(plain)}"


def _text(value: Any) -> str:
    """``value`` as text without addresses, and a set in an order of its own."""
    if isinstance(value, CodeType):
        fields = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount",
                  "co_kwonlyargcount", "co_posonlyargcount", "co_exceptiontable", "co_consts")  # fmt: skip
        return " ".join(_text(getattr(value, field, None)) for field in fields)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__
