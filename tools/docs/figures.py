"""What `verify` measures, for the pages: ``make figures`` writes ``docs/figures.json``.

Each patch is verified on the newest release that has its defect. A figure is shown as long as the reproducer is the one
that gave it; ``make figures`` measures the others again.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from patches import REGISTRY
from patches.engine import Part, gate
from tools import records

from . import DOCS, ROOT

FILE = DOCS / "figures.json"
Figure = Mapping[str, Any]
"""``on`` which releases, ``unpatched`` and ``patched``: what `verify` said; ``reproducer``: a digest of the program."""


def read() -> dict[str, Figure]:
    """The figures of the reproducers that there are now, by patch."""
    if not FILE.exists():
        return {}
    figures = json.loads(FILE.read_text("utf-8"))
    now = {name(p.id, part.name): digest(part) for p in REGISTRY.patches.values() for part in p.parts}
    return {each: figure for each, figure in figures.items() if figure["reproducer"] == now.get(each)}


def name(patch_id: str, part: str) -> str:
    """What a reproducer is called in the file."""
    return f"{patch_id}/{part}" if part else patch_id


def digest(part: Part) -> str:
    """Return a digest of a reproducer as a program: how the source is laid out does not count."""
    run: Any = part.defect
    program = ast.unparse(ast.parse(inspect.getsource(getattr(run, "func", run))))
    arguments = repr((run.args, run.keywords)) if hasattr(run, "func") else ""
    return hashlib.sha256((program + arguments).encode()).hexdigest()[:16]


def measure(ids: Sequence[str]) -> dict[str, Figure]:
    """What `verify` says of ``ids`` in a process like this one, of those that have their defect here."""
    command = [sys.executable, "-m", "patches", "verify", *ids, "--jobs", "1", "--json"]
    env = {**os.environ, "PATCHES_AUTOLOAD": "0"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT, check=False)  # 1: one is wrong
    rows = [row for row in json.loads(done.stdout)["rows"] if row["verdict"] == "ok" and "patched" in row["findings"]]
    parts = {(patch.id, part.name): part for patch in REGISTRY.patches.values() for part in patch.parts}
    return {name(row["id"], row["part"]): _figure(parts[row["id"], row["part"]], row["findings"]) for row in rows}


def _figure(part: Part, findings: Mapping[str, Any]) -> Figure:
    names = dict.fromkeys(["torch", *gate.packages(part)])
    versions = {name: str(gate.installed_version(name)).partition("+")[0] for name in names}
    said = {phase: findings[phase][1] for phase in ("unpatched", "patched")}
    return {"on": versions, **said, "reproducer": digest(part)}


def main() -> None:
    known = read()
    parts = ((patch.id, name(patch.id, part.name)) for patch in REGISTRY.patches.values() for part in patch.parts)
    if missing := list(dict.fromkeys(patch_id for patch_id, each in parts if each not in known)):
        known |= measure(missing)
    FILE.write_text(records.dumps(known), "utf-8")


if __name__ == "__main__":
    main()
