"""What some image models do, from a process of its own."""

from __future__ import annotations

from tests import processor


def main() -> None:
    """Print a JSON object for the models that the arguments name."""
    processor.pretend("plain")  # as where docs/image_models.json was made
    import bitsandbytes  # noqa: F401  (before the fork)
    import peft  # noqa: F401

    from tests.apart import tell

    from .__main__ import SECONDS, product, silent

    silent()
    tell(product(3 * SECONDS))  # other tests run beside it
