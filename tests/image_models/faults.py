"""Why a model of diffusers is not right with the plugin, and whose fault that is; the docs say so beside what it does."""

from __future__ import annotations

FAULTS: dict[str, str] = {}
"""By class; what is not here was not looked into."""
