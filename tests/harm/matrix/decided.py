"""Outcomes that are worse by the rule and stay, each for a reason; what a trial says decides, not its name."""

from __future__ import annotations

DECIDED = {
    "holds two different sets of INT8 codes": (
        "codes were replaced in one of two places after a forward, and nothing tells which is newer (docs/state.md)"
    ),
}


def reason(why: str) -> str:
    """Why this outcome may be; empty if it may not."""
    return next((because for words, because in DECIDED.items() if words in why), "")
