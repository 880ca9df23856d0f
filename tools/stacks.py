"""``python -m tools.stacks [NAME ...]``: what the plugin does on each stack of ``tests/stacks/stacks.toml``.

Each lies alone in ``.stacks``: on top of the torch that is installed here, so that it costs no gigabytes, or with
``TORCH=2.8.0`` in an environment of its own with that torch. There every reproducer and the main flows are run, and
what they say goes into ``docs/stacks.json``, which ``docs/releases.md`` is built from.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.commands import Failed, run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "stacks" / "stacks.toml"
RESULTS = ROOT / "docs" / "stacks.json"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "trl")
VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
Stack = Mapping[str, Any]


def declared() -> dict[str, Stack]:
    """The stacks of the table, in its order."""
    return tomllib.loads(TABLE.read_text("utf-8"))


def main(arguments: Sequence[str]) -> int:
    stacks = declared()
    if unknown := [name for name in arguments if name not in stacks]:
        print(f"no stack is named {unknown[0]!r}; there are: {', '.join(stacks)}", file=sys.stderr)
        return 2
    for name in arguments or stacks:
        _keep(name, measured(name, stacks[name], os.environ.get("TORCH", "")))
        print(f"{name}: done", flush=True)
    return 0


def measured(name: str, stack: Stack, torch: str = "") -> dict[str, Any]:
    """What is installed for ``stack``, what ``verify`` says there, and what its flows say."""
    python, paths = _whole(name, stack, torch) if torch else _beside(name, stack)
    environ = {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))), "PATCHES_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    verified = json.loads(_last(python, environ, "patches", "verify", "--json"))["rows"]
    flows = json.loads(_last(python, environ, "tests.stacks.flows"))
    versions = json.loads(run(python, "-c", VERSIONS, *PACKAGES, cwd=ROOT, **environ))
    names = json.loads(_last(python, environ, "tests.stacks.names"))
    return {"versions": versions, "verify": list(_said(verified)), "flows": flows, "missing names": names}


def _last(python: str, environ: Mapping[str, str], module: str, *arguments: str) -> str:
    """The JSON that a module prints; `verify` ends with 1 where a row is wrong, and prints all the same."""
    code = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode > 1)"
    said = run(python, "-c", code, python, "-W", "ignore", "-m", module, *arguments, cwd=ROOT, **environ)
    return said[said.index("{") :]


def _said(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    for row in rows:
        yield {
            "id": row["id"],
            "verdict": row["verdict"],
            "reason": "" if row["verdict"] == "ok" else row["reason"][:200],
        }


def _keep(name: str, found: Mapping[str, Any]) -> None:
    known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    known.setdefault(name, {})[found["versions"]["torch"]] = found
    text = json.dumps({name: known[name] for name in declared() if name in known}, indent=1, sort_keys=False)
    RESULTS.write_text(text + "\n", "utf-8")


# -- environments ------------------------------------------------------------------------------


def _pins(stack: Stack) -> list[str]:
    return [f"{name}=={stack[name]}" for name in PACKAGES if name in stack and name != "torch"]


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())


def _beside(name: str, stack: Stack) -> tuple[str, list[Path]]:
    """A folder with all of ``stack`` but torch, first on the path of the Python that runs this; none if it has it."""
    here = json.loads(run(sys.executable, "-c", VERSIONS, *PACKAGES))
    if all(here.get(pin.partition("==")[0]) == pin.partition("==")[2] for pin in _pins(stack)):
        return sys.executable, []
    folder = ROOT / ".stacks" / _slug(name)
    done = folder / "complete"
    if not done.exists():
        pip = ("-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--upgrade", "--target", str(folder))
        run(sys.executable, *pip, *_pins(stack), *stack.get("beside", ()))
        done.touch()
    return sys.executable, [folder]


def _whole(name: str, stack: Stack, torch: str) -> tuple[str, list[Path]]:
    """An environment with ``stack`` on ``torch``."""
    folder = ROOT / ".stacks" / f"{_slug(name)}-torch{torch}"
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        run(sys.executable, "-m", "venv", folder)
        pins = (f"torch=={torch}", *_pins(stack), *stack.get("beside", ()), "packaging")
        run(python, "-m", "pip", "install", "--quiet", "--no-compile", *pins)
        done.touch()
    return str(python), []


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failed as failed:
        sys.exit(str(failed))
