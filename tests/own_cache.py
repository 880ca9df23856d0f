"""Inductor with a cache on disk of its own, which is empty: without what it prepares in one for later use."""

from __future__ import annotations


def compile_cheaply() -> None:
    """Write no precompiled headers and try out no vector instructions: that takes 8 s of a processor, a kernel 2 s."""
    from torch._inductor import config

    config.cpp_cache_precompile_headers = False
    config.cpp.vec_isa_ok = False
