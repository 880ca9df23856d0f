"""``make new-patch ID=package-what-goes-wrong``: the skeleton of a patch and of its tests, which fail until it is written.

The id begins with the package that is repaired. Its folder is found by the patches whose names begin with the same word;
otherwise it is asked for, or named by ``IN=int8``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PATCH = '''"""TODO: what goes wrong, in one sentence."""

from __future__ import annotations

from typing import Any

from {dots}engine import Finding, Patch, Rewrite


def _repaired(value: Any) -> Any:
    """TODO: the logic, with types, shapes and dtypes. Never less exact where nothing was wrong."""
    raise NotImplementedError("{id} is not written yet")


def defect() -> Finding:
    """The smallest program of a user that goes wrong: offline, on a CPU, about a second."""
    raise NotImplementedError("{id} has no reproducer yet")


PATCH = Patch(
    id="{id}",
    summary="TODO: what goes wrong for the user without it, in one line",
    groups=("TODO",),  # of patches/symptoms.py; the first is where it is listed
    silent=True,  # TODO: or messages=(Message("the message", "the/file/that/says/it.py"),), or both
    links=("https://github.com/TODO/{package}/issues/0",),
    why="""
        TODO: what is wrong in the source, who meets it, on which releases.
    """,
    repair="""
        TODO: what the patch does, why that is right, what stays as it was.
    """,
    cost="TODO: measured, or leave it out",
    requires=("{package}>={installed}",),  # TODO: the first release with the defect; "<..." where it is repaired
    tested_up_to="{installed}",
    edits=(
        Rewrite(
            "{package}.TODO:Class.method",
            find="TODO: the smallest expression that is wrong",
            replace="_patches_repaired(value)",
            names={{"_patches_repaired": _repaired}},
        ),
    ),
    defect=defect,
)
'''

TESTS = '''"""TODO: what is tested of it, beside what tests/test_contract.py tests of every patch."""

from __future__ import annotations

import patches

ID = "{id}"


def test_right_against_a_reference(device):
    with patches.applied(ID):
        raise NotImplementedError("compare with the dequantized weights")


def test_the_healthy_path_stays_bit_identical(device):
    raise NotImplementedError("torch.equal, unpatched against patched")
'''


NEXT = """\
Next (docs/add.md):
  .venv/bin/python -m patches verify {id}
  its contract, in the environment of CONTRIBUTING.md: PATCH={id} .venv/bin/python -m pytest tests/test_contract.py
  make figures readme docs test, and a line in CHANGELOG.md"""


def files(patch_id: str, inside: str = "") -> dict[Path, str]:
    """The files of a new patch. Raises ``ValueError`` if the id or the folder cannot be one."""
    packages = sorted(path.name for path in (ROOT / "patches" / "repairs").iterdir() if (path / "__init__.py").exists())
    packages.remove("reproducers")
    package, _, name = patch_id.partition("-")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", patch_id) or package not in packages:
        raise ValueError(
            f"{patch_id!r} is not an id: expected <package>-<what-goes-wrong>, with one of the packages {', '.join(packages)}"
        )
    folders = sorted(
        path.name for path in (ROOT / "patches" / "repairs" / package).iterdir() if (path / "__init__.py").exists()
    )
    inside = inside or _folder(package, name, folders)
    if inside not in (folders or [""]):
        raise ValueError(
            f"{package} has the folders {', '.join(folders) or 'none'}: "
            + (f"make new-patch ID={patch_id} IN={folders[0]}" if folders else "leave IN out")
        )
    place = Path("repairs", package, inside)
    stem = name.removeprefix(f"{inside.replace('_', '')}-").replace("-", "_")
    values = {
        "id": patch_id, "package": package, "dots": "." * (len(place.parts) + 1), "installed": _installed(package),
        "torch": ".".join(_installed("torch").split(".")[:2]),
    }  # fmt: skip
    return {
        Path("patches") / place / f"{stem}.py": PATCH.format(**values),
        Path("tests") / place / f"test_{stem}.py": TESTS.format(**values),
    }


def _installed(package: str) -> str:
    """The release of ``package`` that is installed, without what a build adds to it; "0" if it is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "0"


def _folder(package: str, name: str, folders: Sequence[str]) -> str:
    """The one folder of ``package`` where ``name`` belongs by its first word; else what is answered; "" without either."""
    word = name.partition("-")[0]
    root = ROOT / "patches" / "repairs" / package
    found = [each for each in folders if each == word or any((root / each).glob(f"{word}_*.py"))]
    if len(found) == 1:
        return found[0]
    if folders and sys.stdin is not None and sys.stdin.isatty():
        return input(f"folder ({', '.join(folders)}): ").strip()
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make new-patch", description=__doc__.splitlines()[0])
    parser.add_argument("id")
    parser.add_argument("--inside", default="", metavar="FOLDER", help="such as int8, below the folder of the package")
    options = parser.parse_args(argv)
    try:
        new = files(options.id, options.inside)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if there := [str(path) for path in new if (ROOT / path).exists()]:
        print(f"{', '.join(there)}: there already", file=sys.stderr)
        return 2
    for path, text in new.items():
        (ROOT / path).write_text(text)
        print(path)
    print(NEXT.format(id=options.id))
    return 0


if __name__ == "__main__":
    sys.exit(main())
