"""Running one program."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import transformers

from .programs import Program, run
from .rules import broken


def quiet() -> None:
    """Say nothing of what loading says."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()


def outcome(program: Program, folder: Path) -> list[str]:
    """The rules that ``program`` breaks; an error is one."""
    try:
        loaded = run(program, folder)
    except Exception as error:  # noqa: BLE001  (whatever a user would get)
        return [f"loading: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
    return broken(program, loaded)
