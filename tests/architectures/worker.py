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

    from . import __main__ as runner
    from .found import everything

    runner.SECONDS *= 3  # other tests run beside it
    runner.quiet()
    if "unpatched" not in sys.argv:
        patches.apply()
    named = {str(each): each for each in everything()}
    found = {name: runner.apart(named[name]) for name in sys.argv[1:] if name in named}
    print(json.dumps(found))
