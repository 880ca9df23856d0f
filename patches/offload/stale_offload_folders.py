"""Folders of processes that were killed: found by a lock that each process holds on a file in its own.

A process that ends by itself removes its files. One that the system kills, for want of memory above all, cannot;
then the next load that writes beside it does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

FOLDER_PREFIX = "quantized-"
_LOCK = "in-use"
_folders_of_this_process: set[str] = set()  # some file systems grant a process its own lock again


def lock_folder(folder: str) -> int | None:
    """Lock ``folder`` for as long as this process, or one forked from it, is there; None where nothing can be locked."""
    _folders_of_this_process.add(os.path.realpath(folder))
    try:
        import fcntl

        where = _where(folder)
        lock = os.open(os.path.join(folder, f"{_LOCK}.part"), os.O_RDWR | os.O_CREAT, 0o600)
    except (ImportError, OSError):  # not Linux, or a full disk: the next write says so
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, where)
        os.rename(os.path.join(folder, f"{_LOCK}.part"), os.path.join(folder, _LOCK))  # locked before it has the name
    except OSError:
        os.close(lock)
        return None
    return lock


def unlock_folder(folder: str, lock: int | None) -> None:
    """Forget ``folder``, which is removed."""
    _folders_of_this_process.discard(os.path.realpath(folder))
    if lock is not None:
        os.close(lock)


def remove_stale_folders(inside: str) -> None:
    """Remove the folders in ``inside`` whose processes are gone."""
    for folder in Path(inside).glob(f"{FOLDER_PREFIX}*"):
        if os.path.realpath(folder) not in _folders_of_this_process and _is_abandoned(folder / _LOCK):
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(file: Path) -> bool:
    with contextlib.suppress(ImportError, OSError), file.open("r+b") as lock:
        import fcntl

        if lock.read() != _where(file.parent):  # another machine or mount, whose locks may not be seen here
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _where(folder: str | Path) -> bytes:
    """Return a mark of the running kernel and the mount, which processes share that see each other's locks in ``folder``."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes() + str(os.stat(folder).st_dev).encode()
