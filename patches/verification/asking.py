"""Asking many processes, with a bar that shows how far they are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from .. import process_registry
from .processes import ask_processes
from .progress import progress_bar
from .worker import Answer

PREPARE = f"{process_registry.__name__}:REGISTRY.prepare"
"""Called in the process that the others are copies of: works out what patches change, which else each of them does."""


class Asking:
    """Asks questions in processes of their own, which have ``modules`` imported, ``jobs`` at a time."""

    def __init__(self, modules: Sequence[str], jobs: int, progress: bool) -> None:
        self._modules, self._jobs, self._progress = modules, jobs, progress

    def __call__(self, function: str, questions: Sequence[Sequence[str]], label: str) -> list[Answer]:
        """Call ``function``, as ``module:name``, with each of ``questions``; return the answers in their order."""
        found: dict[int, Answer] = {}
        answers = ask_processes(function, questions, self._modules, PREPARE, self._jobs)
        with contextlib.closing(answers), progress_bar(label, len(questions), self._progress) as advance:
            for index, answer in answers:
                found[index] = answer
                advance()
        return [found[index] for index in range(len(questions))]
