"""The code that edits make of a function: made from its source once, and kept for later processes.

To read, parse and compile the functions of all patches takes half a second, to read the kept code 0.03
(``python -m benchmarks.kept_code``). The code is kept as Python keeps the bytecode of a module: in ``__pycache__`` beside
this file, or below ``PYTHONPYCACHEPREFIX``; not with ``-B`` or ``PYTHONDONTWRITEBYTECODE``, nor where that folder cannot be
written. A program that can write there can change this file too.

Kept code is used for a function that still has the code it was made from, in a file of the same size and time of change
(Python asks no more of a ``.pyc``), for the same edits, engine and Python. Otherwise the source decides. Digests of files
are kept with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast

from . import definitions, frames, function_source, match
from .edits import Rewrite

_Stamp = tuple[int, int]
"""Size of a file in bytes, and the time of its last change in whole seconds, as tar and images of containers keep it."""
_Entries = dict[tuple[Any, ...], tuple[_Stamp, bytes]]
"""By file, function, line and edits: the stamp of the file, and the marshalled original code and new code.

Of a file's digests: by file and names.
"""

_MAX_ENTRIES = 1_000  # all patches together make about 250
_HASH_LENGTH = 8  # of importlib.util.source_hash


class Compiler:
    """Makes the code of rewritten functions, each time from the source."""

    def rewritten(self, function: FunctionType, code: CodeType, edits: Sequence[Rewrite]) -> CodeType:
        """Make every edit in ``function``, whose code was ``code``. May raise ``Conflict``."""
        return match.rewrite(function_source.read_source(function, code), edits)

    def holds(self, function: FunctionType, code: CodeType, text: str) -> bool:
        """Tell whether the expression or statements ``text`` stand in ``function``, whose code was ``code``.

        May raise ``Conflict``.
        """
        return match.occurrences(function_source.read_source(function, code), text) > 0

    def digests(self, file: str, names: Sequence[str]) -> Mapping[str, str]:
        """Return the digests of definitions in a source file, see :mod:`.definitions`. May raise what reading it raises."""
        return definitions.digests(Path(file).read_bytes(), names)

    def keep(self) -> None:
        """Write new code to the file, if there is one. Raises no ``Exception``."""


class KeepingCompiler(Compiler):
    """Keeps the code that it made in a file, for this process and later ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: _Entries | None = None
        self._fresh = False

    def rewritten(self, function: FunctionType, code: CodeType, edits: Sequence[Rewrite]) -> CodeType:
        key = _key(function, code, tuple((edit.find, edit.replace, edit.count) for edit in edits))
        return cast(CodeType, self._remembered(key, code, partial(super().rewritten, function, code, edits)))

    def holds(self, function: FunctionType, code: CodeType, text: str) -> bool:
        key = _key(function, code, text)
        return cast(bool, self._remembered(key, code, partial(super().holds, function, code, text)))

    def digests(self, file: str, names: Sequence[str]) -> Mapping[str, str]:
        key = (file, tuple(names))
        return cast(Mapping[str, str], self._remembered(key, None, partial(super().digests, file, names)))

    def _remembered(self, key: tuple[Any, ...], original: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns, or has returned for this key, file and ``original``."""
        stamp = _stamp(key[0])  # before the file is read
        if stamp is None:
            return make()
        if self._entries is None:
            self._entries = self._read()
        before, data = self._entries.get(key, (None, b""))
        if before == stamp:
            known, made = marshal.loads(data)
            if known == original:
                return made
        made = make()
        self._entries[key] = stamp, marshal.dumps((original, made))
        self._fresh = True
        return made

    def keep(self) -> None:
        if not self._fresh or sys.dont_write_bytecode or _ENGINE is None:
            return
        self._fresh = False  # before writing: code that another thread makes meanwhile is written the next time
        with contextlib.suppress(Exception):  # code that cannot be written is made again, as with a .pyc
            self._write()

    def _read(self) -> _Entries:
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
            data = self._path.read_bytes()
            content = data[_HASH_LENGTH:]
            if importlib.util.source_hash(content) == data[:_HASH_LENGTH]:
                engine, entries = marshal.loads(content)
                if engine == _ENGINE:
                    return cast(_Entries, entries)
        return {}

    def _write(self) -> None:
        # The newest first; without the code of files that have changed since.
        newest = reversed((self._entries or {}).copy().items())
        entries = [(key, entry) for key, entry in newest if entry[0] == _stamp(key[0])][:_MAX_ENTRIES]
        content = marshal.dumps((_ENGINE, dict(reversed(entries))))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.{time.monotonic_ns()}")
        mode = os.stat(__file__).st_mode & 0o666 | 0o200
        opened = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        try:
            with open(opened, "wb") as file:
                file.write(importlib.util.source_hash(content) + content)
            os.replace(draft, self._path)  # at once, for a process that reads it now
        finally:
            draft.unlink(missing_ok=True)


def compiler() -> Compiler:
    """Return a compiler that keeps its code beside our own bytecode, if there is a place."""
    try:
        return KeepingCompiler(Path(importlib.util.cache_from_source(str(Path(__file__).with_name("kept_code.py")))))
    except (NotImplementedError, NameError):  # this Python keeps none; we come from no file
        return Compiler()


def _key(function: FunctionType, code: CodeType, asked: object) -> tuple[Any, ...]:
    return (code.co_filename, function.__qualname__, code.co_firstlineno, asked)


def _stamp(path: str | None) -> _Stamp | None:
    """Return the stamp of a file; None if there is no such file."""
    try:
        found = os.stat(cast(str, path))
    except (OSError, ValueError, TypeError):
        return None
    return found.st_size, int(found.st_mtime)


def _engine() -> tuple[Any, ...] | None:
    """Identify this Python and this engine, whose code no other may use; None if our own files cannot be looked at."""
    stamps = [
        _stamp(getattr(sys.modules[name], "__file__", None))
        for name in (__name__, definitions.__name__, frames.__name__, function_source.__name__, match.__name__)
    ]
    return (importlib.util.MAGIC_NUMBER, *stamps) if all(stamps) else None


_ENGINE = _engine()
"""Identifies the engine that was imported: its files may have changed when it writes."""
