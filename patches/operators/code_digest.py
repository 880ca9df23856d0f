"""Operators of ours, under names that say which code is behind them.

torch keeps compiled graphs on disk and finds one again by what Dynamo saw of it: the names and arguments
of operators, not what they do or expand to. Under a name that stays, a graph made by one version of this
package, or of bitsandbytes, is found by the next, and a user with a warm cache never gets a repair in an operator.
So the name carries a digest: of the functions given, of every function and class of the two packages
that their code names, as installed and patched by then, and of the release of bitsandbytes. The digest is made of
bytecode, because frozen applications have no source; another release of Python gives another digest.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import bitsandbytes
import torch

_library = torch.library.Library("bnb_patches", "FRAGMENT")
_PACKAGES = (__name__.partition(".")[0], "bitsandbytes")
_FIELDS_OF_CODE = (
    *("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount"),
    *("co_kwonlyargcount", "co_posonlyargcount", "co_exceptiontable", "co_consts"),
)
_PLAIN = (str, bytes, int, float, complex, type(None), type(...))


def define_operator(
    name: str,
    schema: str,
    key: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> Callable[..., Any]:
    """Define ``bnb_patches::name_<digest>`` and return it.

    ``function`` computes it under the dispatch key ``key``; ``fake``, ``backward`` and ``setup_context`` are what
    ``torch.library`` registers. An operator, once defined, stays in the dispatcher for the life of the process; without
    the patch nothing calls it.
    """
    versioned = versioned_name(name, *filter(None, (function, fake, backward, setup_context)))
    _library.define(versioned + schema, tags=tags)
    _library.impl(versioned, function, key)
    if fake is not None:
        torch.library.register_fake(f"bnb_patches::{versioned}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(
            f"bnb_patches::{versioned}", backward, setup_context=setup_context, lib=_library
        )
    operator: Callable[..., Any] = getattr(torch.ops.bnb_patches, versioned).default
    return operator


def versioned_name(name: str, *behind: Callable[..., Any]) -> str:
    """Return ``name`` with a digest of the code of ``behind``, and of all code of the two packages that it reaches."""
    digest = hashlib.sha256(bitsandbytes.__version__.encode())
    for text in sorted(map(_described, _reached(behind))):
        digest.update(text.encode())
    return f"{name}_{digest.hexdigest()[:16]}"


def _reached(roots: Iterable[Any]) -> list[FunctionType]:
    """Return the functions among ``roots`` and all that they name, directly or through others."""
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
    """Yield the functions and classes of the two packages that the code of ``function`` names, alone or in a module."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    known = {**sys.modules, **function.__globals__}
    for value in (known[name] for name in names if name in known):
        members = (vars(value)[name] for name in names if name in vars(value)) if _is_module(value) else (value,)
        yield from (member for member in members if _is_ours(member))


def _is_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] in _PACKAGES


def _is_ours(value: Any) -> bool:
    """Tell whether ``value`` is a function or class (or a wrapper of one) that one of the two packages defines."""
    module = getattr(value, "__module__", None) if callable(value) else None
    return isinstance(module, str) and module.partition(".")[0] in _PACKAGES


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _described(function: FunctionType) -> str:
    """Return the code of ``function``, its defaults and the plain values that it names, the same in every process."""
    known = function.__globals__
    names = sorted({name for code in _codes(function.__code__) for name in code.co_names})
    plain = [(name, known[name]) for name in names if isinstance(known.get(name, known), _PLAIN)]
    defaults = (function.__defaults__, sorted((function.__kwdefaults__ or {}).items()))
    return f"{function.__qualname__} {_text(function.__code__)} {_text(defaults)} {_text(plain)}"


def _text(value: Any) -> str:
    """Return ``value`` as text without addresses, and a set in sorted order."""
    if isinstance(value, CodeType):
        return " ".join(_text(getattr(value, field, None)) for field in _FIELDS_OF_CODE)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__
