"""The help of ``python -m patches`` and of each of its commands, as a user sees it."""

from __future__ import annotations

import argparse
import os

from patches.__main__ import _parser


def fragment() -> str:
    """For ``docs/commands.md``."""
    os.environ["COLUMNS"] = "80"  # argparse asks it
    parser = _parser()
    subcommands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    parts = [f"## python -m patches {name}\n\n```text\n{each.format_help()}```" for name, each in subcommands.items()]
    return "\n\n".join(parts) + "\n"
