"""Commands that tools run: with the environment of a user, who has none of our variables set."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class Failed(Exception):
    """Something is not as it should be; the message says what."""


def expect(true: bool, otherwise: str) -> None:
    if not true:
        raise Failed(otherwise)


def run(*command: str | Path, cwd: Path | None = None, with_errors: bool = False, **environ: str) -> str:
    """What ``command`` prints, on standard error too if asked for. Raises ``Failed`` with the end of it if it fails."""
    ours = {name for name in os.environ if name == "PYTHONPATH" or name.startswith("PATCHES_")}
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env={**clean, **environ}, capture_output=True, text=True)
    both = f"{done.stdout}\n{done.stderr}"
    tests = "".join(f"{line}\n" for line in both.splitlines() if line.startswith("FAILED"))
    expect(done.returncode == 0, f"`{' '.join(words)[:200]}` failed:\n{tests}{both[-4000:]}")
    return both if with_errors else done.stdout
