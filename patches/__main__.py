"""``python -m patches``, and ``python -m bnb_patches``, which is the same."""

from __future__ import annotations

import sys

from .command_line import command

if __name__ == "__main__":
    sys.exit(command())
