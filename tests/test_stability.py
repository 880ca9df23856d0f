"""docs/stability.md promises what there is: every public name, variable, command and option."""

from __future__ import annotations

import inspect
import re

import pytest

import patches
from tests.test_docs import DOCS, ROOT, sources


def promised(row: str) -> set[str]:
    """The names in a row of the table of docs/stability.md."""
    (line,) = (line for line in (DOCS / "stability.md").read_text("utf-8").splitlines() if line.startswith(f"| {row}"))
    return set(re.findall(r"`([\w.]+)`", line.rpartition(" | ")[2]))


def test_every_public_name_is_promised():
    rows = ("functions of `patches`", "what they return and raise", "how a patch is declared")
    engine = {"Message", "Part", "Rewrite", "SetAttribute", "DeleteAttribute"}
    assert set.union(*map(promised, rows)) - {"to_dict", "patches.engine"} == set(patches.__all__) | engine
    assert all(hasattr(patches.engine, name) for name in engine)


def test_the_variables_that_are_read_are_promised():
    code = [*(ROOT / "patches").rglob("*.py"), ROOT / "bnb_patches_autoload.py"]
    read = {name for file in code for name in re.findall(r"\bPATCHES_[A-Z_]*[A-Z]\b", file.read_text("utf-8"))}
    assert read == promised("environment variables")
    assert all(f"`{name}=" in sources()["use.md"] for name in read)


def test_the_commands_and_their_options_are_promised():
    helped = sources()["generated/commands.md"]
    assert set(re.findall(r"^## python -m patches (\w+)$", helped, re.M)) == promised("commands")
    (line,) = (line for line in sources()["stability.md"].splitlines() if line.startswith("| options of commands"))
    assert set(re.findall(r"(--\w+)", line)) | {"--help"} == set(re.findall(r"(--\w+)\b", helped))


@pytest.mark.parametrize("name", sorted(promised("functions of `patches`")))
def test_every_argument_and_error_of_a_public_function_is_documented(name):
    function = getattr(patches, name)
    said = str(inspect.getdoc(function))
    named = [each for each in inspect.signature(function).parameters if each != "ids"]
    assert not [each for each in named if not re.search(rf"^{each}:$", said, re.M)]
    assert "\nRaises\n------\n" in said or "An unknown id is a ``KeyError``" in said
