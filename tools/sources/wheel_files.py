"""Source files of a release, read from its wheel where that lies: of a wheel of half a gigabyte only what is asked for.

What was read is kept in ``.wheels``, which ``make clean`` removes.
"""

from __future__ import annotations

import functools
import io
import json
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from packaging.version import Version

from tools.commands import Failed

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".wheels"
_INDEX = "https://pypi.org/simple/{}/"
_JSON = {"Accept": "application/vnd.pypi.simple.v1+json"}
_NOTHING = "\0"
"""Kept for a file that the wheel does not have."""


class WheelFiles:
    """The files of one release of a package."""

    def __init__(self, package: str, release: str) -> None:
        self.package, self.release = package, release
        self._kept = KEPT / f"{package}-{release}"

    def text(self, module: str) -> str | None:
        """Return the source of a module or package; None if the release has none of that name."""
        path = module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if (text := self._read(name)) is not None:
                return text
        return None

    def _read(self, name: str) -> str | None:
        kept = self._kept / name.replace("/", "+")
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            try:
                data = self._wheel.read(name)
            except KeyError:
                data = _NOTHING.encode()
            kept.write_bytes(data)
        text = kept.read_bytes().decode("utf-8")
        return None if text == _NOTHING else text

    @functools.cached_property
    def _wheel(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(_Remote(_wheel_url(self.package, self.release)))


def releases(package: str) -> list[str]:
    """Return the final releases of ``package`` that can be installed, the oldest first."""
    offered = [each["filename"] for each in _index(package)["files"] if not each.get("yanked")]
    versions = {Version(name.split("-")[1]) for name in offered if name.endswith(".whl")}
    return [str(version) for version in sorted(versions) if not version.is_prerelease and not version.local]


@functools.cache
def _index(package: str) -> dict[str, Any]:
    request = urllib.request.Request(_INDEX.format(package), headers=_JSON)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _wheel_url(package: str, release: str) -> str:
    """Return where a wheel of the release lies; of those with compiled code one for Linux, for any Python."""
    prefix = f"{package.replace('-', '_')}-{release}-".lower()
    wheels = [each for each in _index(package)["files"] if each["filename"].lower().startswith(prefix)]
    wheels = [each for each in wheels if each["filename"].endswith(("any.whl", "x86_64.whl"))]
    if not wheels:
        raise Failed(f"the index has no wheel of {package} {release}")
    return str(next((each for each in wheels if each["filename"].endswith("any.whl")), wheels[0])["url"])


class _Remote(io.RawIOBase):
    """A file behind an address, of which parts can be read."""

    _BLOCK = 1 << 18

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        self._blocks: dict[int, bytes] = {}
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
            self._size = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        first = self._at // self._BLOCK
        found = b"".join(self._block(number) for number in range(first, -(-end // self._BLOCK)))
        start, self._at = self._at - first * self._BLOCK, end
        return found[start : start + end - (first * self._BLOCK + start)]

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            first = number * self._BLOCK
            last = min(first + self._BLOCK, self._size) - 1
            request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                self._blocks[number] = answer.read()
        return self._blocks[number]
