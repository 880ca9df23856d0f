"""What some architectures do, from a process of its own."""

from __future__ import annotations

from tests import processor


def main() -> None:
    """Print a JSON object for the architectures that the arguments name."""
    processor.pretend("plain")  # as where docs/architectures.json was made
    import bitsandbytes  # noqa: F401  (before the fork)
    import peft  # noqa: F401

    from tests.apart import quiet, tell

    from .__main__ import SECONDS, product

    quiet()
    tell(product(3 * SECONDS))  # other tests run beside it
