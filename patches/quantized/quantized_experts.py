"""Telling quantized experts from other tensors, by the name of their class: nothing is imported for it."""

from __future__ import annotations

from typing import Any

NAMES = ("Experts4bit", "Experts8bit")


def is_quantized_experts(parameter: Any) -> bool:
    """Tell whether ``parameter`` is a tensor of quantized experts."""
    return type(parameter).__name__ in NAMES
