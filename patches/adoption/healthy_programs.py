"""Programs of ordinary users on healthy paths, whose results must be the same to the bit without patches and with them.

Each returns a digest of all its results, and takes about a second on a CPU, without a network. Each is to be run in a
fresh process. What a stack cannot run raises: without patches that says that the program has nothing to tell there,
and with patches only that these do harm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from . import plain_programs, quantized_programs

PROGRAMS: Mapping[str, Callable[[], str]] = {**plain_programs.PROGRAMS, **quantized_programs.PROGRAMS}
"""By what a user does, in words."""
