"""Reading ahead from the disk: while a layer computes, the system reads the files of the next ones.

Nothing is read here. ``posix_fadvise(WILLNEED)`` has the kernel fill its page cache, which it may empty at any time, so
no memory of the process is held and no value can differ. The tensors to come are the ones that came next the time before: a
forward takes the layers in one order, a backward in another. The first pass only learns.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Mapping
from typing import Any

VARIABLE, FORMER_VARIABLE = "PATCHES_PREFETCH", "PATCHES_READ_AHEAD"
_MEGABYTES = 64
_MOST_NAMES = 64  # of tensors that are small
_PIECE = 2**19  # the kernel cuts a longer request short: max_sectors_kb is 512 on many disks

Use = tuple[str, bool]  # a tensor's name, and whether a backward reads it
Region = tuple[str, int, int]  # a file, the first byte, the number of bytes


def prefetch_window() -> int:
    """Return how many bytes are asked for ahead: ``PATCHES_PREFETCH`` in MiB, 0 for none. Any other text is a ``ValueError``."""
    given = VARIABLE if os.environ.get(VARIABLE, "").strip() else FORMER_VARIABLE
    value = os.environ.get(given, "").strip() or str(_MEGABYTES)
    if not value.isdecimal():
        raise ValueError(
            f"{given}={value!r} is not valid; expected a number of MiB to read ahead from the disk, 0 for none "
            f"(default: {_MEGABYTES})"
        )
    return int(value) * 2**20 if hasattr(os, "posix_fadvise") else 0  # macOS and Windows have none


class Prefetcher:
    """The order in which the tensors of an index are read, and the requested ones that are still to come."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._after: dict[Use, Use] = {}
        self._last: Use | None = None
        self._coming: deque[tuple[Use, int]] = deque()
        self._held = 0  # bytes of what is coming
        self._files: dict[str, dict[str, Region]] = {}

    def ask_after(self, name: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Ask for the tensors that were read after ``name`` the last time; ``name`` is about to be read."""
        if not self._window:
            return
        import torch

        now = name, torch._C._current_graph_task_id() != -1
        last, self._last = self._last, now  # two threads may mix up what follows what: a useless hint
        if last is not None:
            self._after[last] = now
        if self._coming and self._coming[0][0] == now:
            self._held -= self._coming.popleft()[1]
        else:
            self._coming.clear()  # another order than the last time
            self._held = 0
        self._extend(now, entries)

    def _extend(self, now: Use, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Ask for more of the tensors to come, until the window is full."""
        one = self._coming[-1][0] if self._coming else now
        while self._held < self._window and len(self._coming) < _MOST_NAMES:
            following = self._after.get(one)
            if following is None or following == now:
                return
            file, first, count = self._region(entries.get(following[0], {}))
            _ask(file, first, min(count, self._window - self._held))
            self._coming.append((following, count))
            self._held, one = self._held + count, following

    def _region(self, entry: Mapping[str, Any]) -> Region:
        """Return where the tensor of ``entry`` lies: of one that consists of several all of its file, of an unknown one nothing."""
        file, name = entry.get("safetensors_file", ""), entry.get("weight_name", "")
        if file not in self._files:  # the header of a checkpoint names all of its tensors
            self._files[file] = tensor_regions(file)
        found = self._files[file]
        return found.get(name) or found[""]


def tensor_regions(file: str) -> dict[str, Region]:
    """Return where each tensor of a safetensors ``file`` lies, and under "" all of them; nothing if it cannot be read."""
    found = {"": (file, 0, 0)}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        spans = {name: value["data_offsets"] for name, value in header.items() if name != "__metadata__"}
        found |= {name: (file, 8 + size + first, last - first) for name, (first, last) in spans.items()}
        found[""] = file, 8 + size, max(last for _, last in spans.values())
    return found


def _ask(file: str, first: int, count: int) -> None:
    if not count:
        return
    with contextlib.suppress(OSError):  # the read itself raises the error
        opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _is_cached(opened, first + count - 1):
                return
            for start in range(first, first + count, _PIECE):
                os.posix_fadvise(opened, start, min(_PIECE, first + count - start), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(opened)


def _is_cached(opened: int, at: int) -> bool:
    """Tell whether the byte is in the page cache: then all is, most likely, and asking would look up each page."""
    try:
        return os.preadv(opened, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except (AttributeError, OSError):  # not Linux; not cached, or a file system that does not tell
        return False
