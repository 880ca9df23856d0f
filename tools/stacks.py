"""``python -m tools.stacks [NAME ...]``: what the plugin does on each stack of ``tests/stacks/stacks.toml``.

Each lies alone in ``.stacks``: on top of the torch that is installed here, so that it costs no gigabytes, or with
``TORCH=2.8.0`` on top of that torch, with ``TORCH=pinned`` of the one that people have with it. There every reproducer and
the main flows are run, and what they say goes into ``docs/stacks.json``, which ``docs/releases.md`` is built from. ``ONLY="verify"`` runs one part of
three (names, verify, flows), ``IDS`` the reproducers of these patches only, and ``FLOWS="graphs FSDP2"`` the flows that have
one of these words in their names.

A stack with a ``python`` of its own lies in an environment of that Python, with its own torch, which may be gigabytes: it is
run where it is named, and with ``TORCH=pinned``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from tools.commands import Failed, expect, run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "stacks" / "stacks.toml"
RESULTS = ROOT / "docs" / "stacks.json"
SHIPPED = ROOT / "patches" / "tested_stacks" / "table.json"
DATASETS = (
    "datasets==4.4.2", "pyarrow==22.0.0", "pandas==2.3.3", "multiprocess==0.70.18", "dill==0.4.0", "xxhash==3.6.0",
    "pytz", "python-dateutil==2.9.0.post0", "six==1.17.0", "tzdata", "httpx==0.28.1", "httpcore==1.0.9", "h11==0.16.0",
    "anyio==4.11.0", "sniffio==1.3.1", "idna", "certifi", "requests==2.34.2", "urllib3==2.7.0", "charset_normalizer==3.4.7",
)  # fmt: skip
"""What TRL imports, of any release."""
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "trl", "diffusers")
NOT_EVERYWHERE = ("trl", "diffusers")
"""Packages that a stack may lack. One that is too old for the patches of it hinders no other patch."""
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
FOR_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "packaging")
Stack = Mapping[str, Any]


class Place(NamedTuple):
    """Where a stack is run: by which Python, with which variables."""

    python: Path
    environ: Mapping[str, str]


def declared() -> dict[str, Stack]:
    """The stacks of the table, in its order."""
    return tomllib.loads(TABLE.read_text("utf-8"))


def main(arguments: Sequence[str]) -> int:
    stacks = declared()
    if unknown := [name for name in arguments if name not in stacks]:
        print(f"no stack is named {unknown[0]!r}; there are: {', '.join(stacks)}", file=sys.stderr)
        return 2
    asked = os.environ.get("TORCH", "")
    for name in arguments or [name for name in stacks if asked == "pinned" or "python" not in stacks[name]]:
        measured(name, stacks[name], stacks[name]["torch"] if asked == "pinned" else asked)
        print(f"{name}: done", flush=True)
    return 0


def measured(name: str, stack: Stack, torch: str = "") -> None:
    """Note what ``verify`` says on ``stack``, what its flows say, and which names of torch are not there."""
    other = stack.get("python", "")
    python = _python(name, stack, torch) if other else Path(sys.executable)
    path = os.pathsep.join(map(str, (*([] if other else folders(name, stack, torch)), ROOT)))
    environ = {"PYTHONPATH": path, "PATCHES_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    versions = json.loads(run(python, "-c", VERSIONS, *PACKAGES, cwd=ROOT, **environ))
    run(python, "-c", f"import {', '.join(versions)}", cwd=ROOT, **environ)  # a package is missing, or too new
    versions |= {"python": other} if other else {}
    for part in os.environ.get("ONLY", " ".join(PARTS)).split():
        _keep(name, versions, part, PARTS[part](Place(python, environ)))


def _verified(place: Place) -> list[dict[str, str]]:
    return list(said(printed(place, "patches", "verify", "--json", *_words("IDS"))["rows"]))


def _words(variable: str) -> list[str]:
    return os.environ.get(variable, "").split()


PARTS: dict[str, Callable[[Place], Any]] = {
    "names": lambda place: printed(place, "tests.stacks.names"),
    "verify": _verified,
    "flows": lambda place: printed(place, "tests.stacks.flows", *_words("FLOWS")),
}


def printed(place: Place, module: str, *arguments: str) -> Any:
    """What a module prints; `verify` ends with 1 where a row is wrong, and prints all the same."""
    code = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode > 1)"
    words = (str(place.python), "-W", "ignore", "-m", module, *arguments)
    text = run(place.python, "-c", code, *words, cwd=ROOT, **place.environ)
    return json.loads(text[text.index("{") :].replace(str(ROOT), ""))


def said(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    for row in rows:
        part = {"part": row["part"]} if row.get("part") else {}
        yield {"id": row["id"], **part, "verdict": row["verdict"], "reason": row["reason"][:200]}


def _keep(name: str, versions: Mapping[str, str], part: str, found: Any) -> None:
    known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    runs = known.setdefault(name, {})
    here = runs.setdefault(versions["torch"], {})
    if part == "flows" and _words("FLOWS"):
        found = {**here.get(part, {}), **found}
    if part == "verify":
        kept = here.get(part, ()) if _words("IDS") else ()
        rows = {(row["id"], row.get("part", "")): row for row in (*kept, *found)}
        found = [rows[name] for name in sorted(rows)]
    here.update({"versions": versions, part: found})
    write(known)


def write(known: Mapping[str, Any]) -> None:
    RESULTS.write_text(as_lines({name: known[name] for name in declared() if name in known}), "utf-8")
    SHIPPED.write_text(shipped(), "utf-8")


def as_lines(known: Mapping[str, Any]) -> str:
    """JSON with a record on a line of its own: a diff of the file says what a change of the plugin changes."""
    text = json.dumps(known, indent=1)
    return re.sub(r"\{\n +([^{}]+?)\n +\}", lambda record: "{" + re.sub(r"\n +", " ", record[1]) + "}", text) + "\n"


def series(release: str) -> str:
    """``2.13`` of ``2.13.0``."""
    return ".".join(release.split(".")[:2])


def shipped() -> str:
    """What the package knows of the table: the oldest of each package, and of each stack that was run its releases.

    Of torch all that the stack was run with.
    """
    found = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    known = {name: [torch for torch, part in runs.items() if "verify" in part] for name, runs in found.items()}
    stacks = declared()
    oldest = {
        package: min((stack[package] for stack in stacks.values()), key=Version)
        for package in PACKAGES if package not in NOT_EVERYWHERE
    }  # fmt: skip
    run = {
        name: {
            package: sorted(known[name], key=Version) if package == "torch" else [stack[package]]
            for package in PACKAGES if package in stack
        }
        for name, stack in stacks.items() if known.get(name)
    }  # fmt: skip
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in run.items())
    return f'{{"oldest": {json.dumps(oldest)},\n"run": {{\n{rows}\n}}}}\n'


# -- environments ------------------------------------------------------------------------------


def _pins(stack: Stack) -> list[str]:
    return [f"{name}=={stack[name]}" for name in PACKAGES if name in stack and name not in ("torch", "trl")]


def slug(name: str) -> str:
    """The name of a folder for ``name``."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())


def folders(name: str, stack: Stack, torch: str = "") -> list[Path]:
    """What goes first on the path of the Python that runs this: the packages of ``stack`` and, where named, a torch.

    A torch is shared by all stacks that are run with it.
    """
    folders = []
    here = json.loads(run(sys.executable, "-c", VERSIONS, *PACKAGES))
    if any(here.get(pin.partition("==")[0]) != pin.partition("==")[2] for pin in _pins(stack)):
        folders.append(_installed(slug(name), "--no-deps", *_pins(stack), *stack.get("beside", ())))
    if "trl" in stack:
        folders.append(_installed(f"trl-{stack['trl']}", "--no-deps", f"trl=={stack['trl']}"))
        folders.append(_installed("datasets", "--no-deps", *DATASETS))
    if torch and torch != here["torch"]:
        folders.append(_installed(f"torch-{torch}", f"torch=={torch}"))
    return folders


def _python(name: str, stack: Stack, torch: str = "") -> Path:
    """The Python of an environment that holds all of ``stack``; made anew if that is not what it was made of."""
    what = [f"torch=={torch or stack['torch']}", *_pins(stack), *stack.get("beside", ()), *FOR_TESTS]
    folder = ROOT / ".stacks" / slug(name)
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists() or done.read_text("utf-8").split() != what:
        shutil.rmtree(folder, ignore_errors=True)
        run(_found(stack["python"]), "-m", "venv", folder)
        run(python, *"-m pip install --quiet --no-compile".split(), *what)
        done.write_text("\n".join(what), "utf-8")
    return python


def _found(release: str) -> Path:
    """A Python of this release: of pyenv, or on the path. Raises ``Failed`` if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    there = [*pyenv.glob(f"{release}.*/bin/python"), *filter(None, [shutil.which(f"python{release}")])]
    expect(bool(there), f"Python {release} is not installed: `pyenv install {release}`")
    return Path(there[0])


def _installed(name: str, *what: str) -> Path:
    return installed(ROOT / ".stacks" / name, *what)


def installed(folder: Path, *what: str) -> Path:
    """``folder``, which holds ``what``; made anew if that is not what it was made of."""
    done = folder / "complete"
    if not done.exists() or done.read_text("utf-8").split() != list(what):
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, *"-m pip install --quiet --no-compile --upgrade --target".split(), str(folder), *what)
        done.write_text("\n".join(what), "utf-8")
    return folder


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failed as failed:
        sys.exit(str(failed))
