"""What torch does for later use, or for figures of its own, when it compiles: nothing that a test reads."""

from __future__ import annotations

import logging
import sys


def for_an_empty_cache() -> None:
    """Write no precompiled headers and try out no vector instructions: that takes 8 s of a processor, a kernel 2 s.

    For Inductor with a cache on disk of its own, which is empty.
    """
    from torch._inductor import config

    config.cpp_cache_precompile_headers = False
    config.cpp.vec_isa_ok = False


def without_figures() -> None:
    """Do not time the guards of each graph with flushed caches (25 ms), nor write a trace of each step of compiling.

    The trace is written if anybody listens, and pytest listens to what does not propagate. It takes a tenth of the time.
    """
    logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
