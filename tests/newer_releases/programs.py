"""Programs that find copies of packages in a folder: what is decided for them there, and what they are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

VERDICTS = """
import json, sys
from patches import REGISTRY
parts = [part for patch in REGISTRY.patches.values() for part in patch.parts]
found = {part.key: REGISTRY.verdict(part) for part in parts}
assert "torch" not in sys.modules
print(json.dumps({key: [verdict.status, verdict.reason] for key, verdict in found.items()}))
"""
LOG = """
import json, logging
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append([record.levelname, record.getMessage()])
logging.getLogger("bnb_patches").addHandler(handler)
"""
"""The begin of a program: it keeps the lines that it is told."""
STACK = """
logging.getLogger("bnb_patches").setLevel(logging.INFO)
import torch, accelerate, transformers, peft, bitsandbytes
from patches.adoption import quantized_programs
"""
TARGETS = """
import patches
patches.REGISTRY.import_targets(*filter(patches.REGISTRY.is_for, patches.REGISTRY.patches.values()))
"""


def reported(body: str, said: str = "None") -> str:
    """A program that runs ``body`` and prints a :class:`Said`; ``said`` is an expression, which may name its ``report``."""
    end = f"""
import patches
report = patches.report()
results = {{result.id: [result.status, result.reason] for result in report}}
print()
print(json.dumps([results, lines, list(report.notes), {said}]))
"""
    return LOG + body + end


class Said(NamedTuple):
    """What a program has found in its report, and was told in lines of the log."""

    results: Mapping[str, tuple[str, str]]
    lines: list[list[str]]
    notes: list[str]
    said: Any

    @property
    def warnings(self) -> list[str]:
        return [text for level, text in self.lines if level == "WARNING"]

    def ids(self, status: str) -> set[str]:
        return {patch_id for patch_id, (found, _) in self.results.items() if found == status}


def environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with copies in ``folder`` before all else."""
    return {**environ, "PYTHONPATH": f"{folder}{os.pathsep}{environ['PYTHONPATH']}"}


def run(source: str, folder: Path, environ: Mapping[str, str]) -> Any:
    """What ``source`` prints as its last line, as JSON, in a fresh process."""
    env = environment(folder, environ)
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def flow(then: str, folder: Path, repaired: Mapping[str, str], **environ: str) -> Said:
    """What a program finds that imports the stack from ``folder``, whose entry point repairs it.

    ``then`` sets ``said``; ``repaired``: the fixture of that name.
    """
    return Said(*run(reported(STACK + then + TARGETS, "said"), folder, {**repaired, **environ}))


def verdicts(folder: Path, **environ: str) -> dict[str, tuple[str, str]]:
    """Status and reason of each part by its key, before anything is imported."""
    return {key: (status, reason) for key, (status, reason) in run(VERDICTS, folder, {**os.environ, **environ}).items()}
