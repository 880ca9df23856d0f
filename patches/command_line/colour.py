"""Colour for a finished answer, where a person reads it on a terminal: the text stays as it is, and as wide."""

from __future__ import annotations

import os
import re
from typing import TextIO

from .. import symptoms
from ..engine.report import Status
from . import explain

_BOLD, _RED, _GREEN, _YELLOW, _CYAN = (f"\x1b[{code}m" for code in (1, 31, 32, 33, 36))
_END = "\x1b[0m"
_STATES = {
    **dict.fromkeys(("applied", "ok"), _GREEN),
    **dict.fromkeys(map(str, (Status.CONFLICT, Status.FAILED, "wrong")), _RED),
    **dict.fromkeys(map(str, (Status.SHADOWED, Status.UNTESTED, Status.DISABLED, "note")), _YELLOW),
}
_STATE = re.compile(rf"(?m)(?:^|(?<=\d ))(?:{'|'.join(_STATES)})(?=:|,|  |$)")
_TITLES = {
    "explain": re.compile(rf"\A[\w-]+$|^(?:{'|'.join(explain.HEADINGS)})$", re.MULTILINE),
    "list": re.compile(rf"(?m)^.+ \((?:{'|'.join(symptoms.GROUPS)})\)$"),
}
_DIFF = re.compile(r"(?m)^(?:(?P<file>---|\+\+\+) |(?P<place>@@)|(?P<new>\+)|(?P<old>-)).*$")
_OF_DIFF = {"file": _BOLD, "place": _CYAN, "new": _GREEN, "old": _RED}


def wanted(stream: TextIO) -> bool:
    """Tell whether ``stream`` is a terminal that has colours. ``NO_COLOR`` and ``FORCE_COLOR`` decide otherwise."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def painted(text: str, command: str) -> str:
    """Return ``text``, the answer of ``command``, with escapes for colour."""
    if command == "diff":
        return _DIFF.sub(lambda found: f"{_OF_DIFF[str(found.lastgroup)]}{found[0]}{_END}", text)
    if command in _TITLES:
        return _TITLES[command].sub(lambda found: f"{_BOLD}{found[0]}{_END}", text)
    return _STATE.sub(lambda found: f"{_STATES[found[0]]}{found[0]}{_END}", text)
