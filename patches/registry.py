"""The one registry of this process: every patch that there is, and what it has changed."""

from __future__ import annotations

from .engine import catalog, compiler
from .engine.build import Builder
from .engine.registry import Registry
from .repairs.helpers.process import compiled_code, live_objects

REGISTRY = Registry(catalog.patches(), compiled_code.forget, live_objects.one_walk, Builder(compiler.compiler()))
