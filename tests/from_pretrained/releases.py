"""Older releases of transformers, each in a folder of its own with what goes with it: ``python -m tests.from_pretrained.releases``.

A folder lies in ``.stacks``, on top of the torch that is installed here. With ``--some N`` only N programs are run on each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_FOR_4 = (
    "huggingface_hub==0.36.2",
    "requests==2.34.2",
    "urllib3==2.7.0",
    "charset_normalizer==3.4.7",
    "certifi",
    "idna",
)
_FOR_5 = ("huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9", "h11==0.16.0",
          "anyio==4.11.0", "sniffio==1.3.1", "certifi", "idna")  # fmt: skip


class Release(NamedTuple):
    """A release of transformers."""

    transformers: str
    bitsandbytes: str
    beside: tuple[str, ...]

    def __str__(self) -> str:
        return self.transformers

    @property
    def folder(self) -> Path:
        return ROOT / ".stacks" / f"from_pretrained-{self.transformers}"

    @property
    def is_installed(self) -> bool:
        return (self.folder / "complete").exists() and self._bitsandbytes.is_dir()

    @property
    def _bitsandbytes(self) -> Path:
        return ROOT / ".bnb" / self.bitsandbytes

    def install(self) -> None:
        """Download what is missing."""
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--upgrade", "--target")
        if not (self.folder / "complete").exists():
            subprocess.run([*pip, str(self.folder), f"transformers=={self.transformers}", *self.beside], check=True)
            (self.folder / "complete").touch()
        if not self._bitsandbytes.is_dir():
            subprocess.run([*pip, str(self._bitsandbytes), f"bitsandbytes=={self.bitsandbytes}"], check=True)

    def run(self, *arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
        """``python -m tests.from_pretrained`` with this release."""
        path = os.pathsep.join(map(str, (self.folder, self._bitsandbytes, ROOT)))
        env = {**os.environ, "PYTHONPATH": path, "PATCHES_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "tests.from_pretrained", *arguments]
        pipe = subprocess.PIPE if capture else None
        return subprocess.run(command, env=env, cwd=ROOT, text=True, stdout=pipe, stderr=pipe, check=False)


RELEASES = (
    Release("4.53.3", "0.46.1", ("peft==0.16.0", "accelerate==1.8.1", "tokenizers==0.21.4", *_FOR_4)),
    Release("4.57.6", "0.48.2", ("peft==0.18.1", "accelerate==1.11.0", "tokenizers==0.22.2", *_FOR_4)),
    Release("5.10.4", "0.49.2", ("peft==0.19.1", "accelerate==1.13.0", "tokenizers==0.22.2", *_FOR_5)),
    Release("5.17.0", "0.50.2", ("peft==0.20.0", "accelerate==1.13.0", "tokenizers==0.23.3", *_FOR_5)),
)
"""The oldest that is supported, the last of transformers 4, and two between this and the newest."""
DAILY = RELEASES[2]
"""The older ones, 4.53 and 4.57, `make check` meets as whole stacks: ``tests/stacks/slice_defects.py``."""


def main(arguments: list[str]) -> int:
    failed = 0
    for release in RELEASES:
        release.install()
        failed |= release.run(*arguments).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
