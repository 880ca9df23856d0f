"""The code that edits make of a function: made from its source, once, and kept for later processes.

To read, parse and compile a hundred functions takes a tenth of a second. What comes of it is kept as Python keeps
the bytecode of a module: in ``__pycache__`` beside this file, or below ``PYTHONPYCACHEPREFIX``; not with ``-B`` or
``PYTHONDONTWRITEBYTECODE``, nor where that folder cannot be written. A program that can write there can change this file too.

It is used for a function that has the very code that it was made from, out of a file of the same size and time of
change (which is all that Python asks of a ``.pyc``), for the same edits, engine and Python. Else the source decides.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast

from . import frames, locate, match
from .edits import Rewrite

_Stamp = tuple[int, int]
"""Size of a file in bytes, and the time of its last change in whole seconds, as tar and images of containers keep it."""
_Entries = dict[tuple[Any, ...], tuple[_Stamp, bytes]]
"""By file, function, line and what was asked: the stamp of the file, and the original and what was made of it."""

_MOST = 1_000
"""Entries in a file; all patches together make a hundred."""
_HASH = 8
"""Length of ``importlib.util.source_hash``."""


class Compiler:
    """Reads the source each time."""

    def rewritten(self, function: FunctionType, code: CodeType, edits: Sequence[Rewrite]) -> CodeType:
        """The code of ``function``, which was ``code``, with every edit made. May raise ``Conflict``."""
        return match.rewrite(locate.read(function, code), edits)

    def holds(self, function: FunctionType, text: str) -> bool:
        """Whether the expression or statements ``text`` stand in ``function``. May raise ``Conflict``."""
        return match.occurrences(locate.read(function, function.__code__), text) > 0

    def keep(self) -> None:
        """Write down what was made since the last time, where that is done. Raises no ``Exception``."""


class KeepingCompiler(Compiler):
    """Remembers the code that it made, in this process and in later ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: _Entries | None = None
        self._fresh = False

    def rewritten(self, function: FunctionType, code: CodeType, edits: Sequence[Rewrite]) -> CodeType:
        asked = tuple((edit.find, edit.replace, edit.count) for edit in edits)
        make = partial(super().rewritten, function, code, edits)
        return cast(CodeType, self._remembered(function, code, asked, make))

    def holds(self, function: FunctionType, text: str) -> bool:
        return cast(bool, self._remembered(function, function.__code__, text, partial(super().holds, function, text)))

    def _remembered(self, function: FunctionType, code: CodeType, asked: Any, make: Callable[[], Any]) -> Any:
        stamp = _stamp(code.co_filename)  # before the file is read
        if stamp is None:
            return make()
        if self._entries is None:
            self._entries = self._read()
        key = (code.co_filename, function.__qualname__, code.co_firstlineno, asked)
        before, data = self._entries.get(key, (None, b""))
        if before == stamp:
            original, made = marshal.loads(data)
            if original == code:
                return made
        made = make()
        self._entries[key] = stamp, marshal.dumps((code, made))
        self._fresh = True
        return made

    def keep(self) -> None:
        if not self._fresh or sys.dont_write_bytecode or _ENGINE is None:
            return
        self._fresh = False  # before: what another thread makes meanwhile is written the next time
        with contextlib.suppress(Exception):  # as for a .pyc: what cannot be written is made again
            self._write()

    def _read(self) -> _Entries:
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
            data = self._path.read_bytes()
            content = data[_HASH:]
            if importlib.util.source_hash(content) == data[:_HASH]:
                engine, entries = marshal.loads(content)
                if engine == _ENGINE:
                    return cast(_Entries, entries)
        return {}

    def _write(self) -> None:
        # The newest first; without what was made from files that are others now.
        newest = reversed((self._entries or {}).copy().items())
        entries = [(key, entry) for key, entry in newest if entry[0] == _stamp(key[0])][:_MOST]
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
    """A compiler that keeps its code beside our own bytecode, if there is a place."""
    try:
        return KeepingCompiler(Path(importlib.util.cache_from_source(str(Path(__file__).with_name("kept_code.py")))))
    except (NotImplementedError, NameError):  # this Python keeps none; we come from no file
        return Compiler()


def _stamp(path: str | None) -> _Stamp | None:
    """None if there is no such file."""
    try:
        found = os.stat(cast(str, path))
    except (OSError, ValueError, TypeError):
        return None
    return found.st_size, int(found.st_mtime)


def _engine() -> tuple[Any, ...] | None:
    """What another Python or another engine has not in common with this; None if our own files cannot be looked at."""
    stamps = [
        _stamp(getattr(sys.modules[name], "__file__", None))
        for name in (__name__, frames.__name__, locate.__name__, match.__name__)
    ]
    return (importlib.util.MAGIC_NUMBER, *stamps) if all(stamps) else None


_ENGINE = _engine()
"""Of the engine that was imported: its files may be others when it writes."""
