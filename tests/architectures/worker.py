"""What some architectures do with the plugin, from a process that has run nothing else: forks of others may wait for ever."""

from __future__ import annotations

import json
import sys

from tests import processor


def main() -> None:
    """Print a JSON object for the architectures that the arguments name."""
    processor.pretend("plain")  # as where docs/architectures.json was made
    import bitsandbytes  # noqa: F401  (before the fork)
    import peft  # noqa: F401

    import patches

    from tests.apart import quiet

    from .__main__ import SECONDS, product

    quiet()
    way = "unpatched" if "unpatched" in sys.argv else "patched"
    if way == "patched":
        patches.apply()
    every = product(3 * SECONDS)  # other tests run beside it
    found = {name: every.apart(name, way) for name in sys.argv[1:] if name in every.judges}
    print(json.dumps(found))
