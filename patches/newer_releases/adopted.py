"""What ``python -m patches adopt`` has verified on this machine, read from its file.

The file holds ids, versions, digests and dates, no code. It is ``$PATCHES_ADOPTED``, or lies in the user's cache folder.
One that others can write to, or that cannot be read, counts for nothing, and that is said once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..engine.ids import patch_id_of

VARIABLE = "PATCHES_ADOPTED"
_FORMAT = 1
_MAX_BYTES = 10_000_000
_MAX_ENTRIES = 2_000


class Entry(NamedTuple):
    """One patch, or one part of it, that held on one stack."""

    patch: str
    """The key of the part: the id, with its name if there are several."""
    versions: Mapping[str, str]
    sources: str
    """Digest of the source that the patch rests on, and of its edits."""
    on: str
    """The date, as in 2026-11-27."""


class Unusable(Exception):
    """The file counts for nothing; the message says why and what to do."""


class Nowhere(OSError):
    """There is no folder that is the user's, and no file is named."""


def adopted_file() -> Path:
    """Return the path of the file, which need not exist. Raises ``Nowhere``."""
    if named := os.environ.get(VARIABLE, ""):
        return Path(named)
    return cache_folder() / "adopted.json"


def cache_folder() -> Path:
    """Return the folder of the user's cache that is ours. Raises ``Nowhere``."""
    try:
        return _users_cache() / "bnb-patches"
    except RuntimeError as error:  # a container with a user that has no name and no HOME
        raise Nowhere("there is no home folder") from error


def _users_cache() -> Path:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base)


def read_entries(path: Path) -> list[Entry]:
    """Return the entries of the file; none where there is no file and no one has named it.

    Raises ``Unusable``.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as opened:
            _check_owner(path, os.fstat(opened.fileno()))
            data = opened.read(_MAX_BYTES)
        content = json.loads(data)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        return [_entry(row) for row in content["entries"]]
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.environ.get(VARIABLE):
            raise Unusable(f"{VARIABLE}={path}: there is no such file; `python -m patches adopt` writes it") from error
        return []
    except OSError as error:
        raise Unusable(f"{path} cannot be read ({error.strerror or error}), and counts for nothing") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = f"{path} is damaged, and counts for nothing; `python -m patches adopt` writes it anew"
        raise Unusable(said) from error


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe without a writer must not hold up an import."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_owner(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise Unusable(f"{path} is no file, and counts for nothing")
    if not hasattr(os, "geteuid"):  # Windows: the folder is the user's own
        return
    if found.st_uid not in (os.geteuid(), 0):
        raise Unusable(f"{path} belongs to another user, and counts for nothing; remove it")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unusable(f"{path} can be written to by others, and counts for nothing; to change that: chmod go-w {path}")


def _entry(row: Mapping[str, object]) -> Entry:
    versions = row["versions"]
    if not isinstance(versions, dict) or not all(isinstance(row[name], str) for name in ("patch", "sources", "on")):
        raise TypeError("an entry is not as it was written")
    return Entry(str(row["patch"]), {str(k): str(v) for k, v in versions.items()}, str(row["sources"]), str(row["on"]))


def add_entries(fresh: Collection[Entry]) -> None:
    """Add entries to the file, in the place of those for the same patch and stack. Raises ``OSError``."""
    replaced = {(entry.patch, tuple(entry.versions.items())) for entry in fresh}

    def added(known: list[Entry]) -> list[Entry]:
        others = [entry for entry in known if (entry.patch, tuple(entry.versions.items())) not in replaced]
        return [*others, *fresh][-_MAX_ENTRIES:]

    if fresh:
        _change(adopted_file(), added)


def forget_entries(ids: Collection[str]) -> int:
    """Take out the entries of patches, or all if none is named; return how many. Raises ``OSError``."""
    gone = 0

    def without(known: list[Entry]) -> list[Entry]:
        nonlocal gone
        kept = [entry for entry in known if ids and patch_id_of(entry.patch) not in ids]
        gone = len(known) - len(kept)
        return kept

    if adopted_file().exists():
        _change(adopted_file(), without)
    return gone


def _change(path: Path, change: Callable[[list[Entry]], list[Entry]]) -> None:
    """Write the file anew, one process after the other: it is there whole or as it was. A link stays one."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():  # to replace a device would do harm
        raise FileExistsError(errno.EEXIST, "it is no file")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(path):
        try:
            known = read_entries(path)
        except Unusable:  # it counted for nothing
            known = []
        rows = ",\n".join(json.dumps(entry._asdict()) for entry in change(known))
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with open(os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644), "w", encoding="utf-8") as opened:
                opened.write(f'{{"format": {_FORMAT}, "entries": [\n{rows}\n]}}\n')
            os.chmod(draft, 0o644)  # others may read it, whatever the mask lets pass
            os.replace(draft, path)
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let no other process change the file meanwhile, where the system can say so."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path.with_name(f"{path.name}.lock"), "w", encoding="utf-8") as lock:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
