"""Telling quantized experts from other tensors, by the name of their class: nothing is imported for it."""

from __future__ import annotations

from typing import Any

NAMES = ("Experts4bit", "Experts8bit")


def is_quantized_experts(parameter: Any) -> bool:
    """Whether ``parameter`` is quantized experts; asks by name, which needs no import of torch."""
    return type(parameter).__name__ in NAMES
