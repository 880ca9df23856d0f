"""The help of each command of ``python -m patches``, as a user sees it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from patches.command_line import _parser


def fragment() -> str:
    """For ``docs/commands.md``."""
    return "\n\n".join(f"## {command.prog}\n\n```text\n{command.format_help()}```" for command in _commands()) + "\n"


def _commands() -> Iterator[argparse.ArgumentParser]:
    parser = _parser()
    subparsers = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in (parser, *next(subparsers).choices.values()):
        command.formatter_class = partial(argparse.HelpFormatter, width=78)  # whatever the terminal is
        command.color = False  # Python 3.14
        yield command
