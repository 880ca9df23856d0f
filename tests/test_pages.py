"""Every Python program that README and the pages show runs to its end, as it is written but for what :mod:`tests.pages` makes smaller."""

from __future__ import annotations

import json

import pytest

from patches.engine import gate
from tests.pages import GIVEN, NOT_RUN, ROOT, programs
from tests.releases import is_newest

PROGRAM = "import sys; from tests import pages; pages.run(*sys.argv[1:])"
pytestmark = pytest.mark.skipif(not is_newest(), reason="the pages show programs for the newest release")
OFFLOADED = ("README.md", "docs/diffusers.md", "docs/does_not_fit.md")
"""The pages whose model does not fit."""


def marks(page: str) -> list[pytest.MarkDecorator]:
    compiles = page == "docs/compile_options.md"
    return [pytest.mark.check("compiles a step; programs/test_flows.py compiles one")] if compiles else []


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks(page)) for page in GIVEN])
def test_the_programs_of_a_page_run(page, forked, tmp_path):
    if page == "docs/diffusers.md" and not gate.satisfied("diffusers"):
        pytest.skip("diffusers is not installed")
    said = json.loads(forked(PROGRAM, page, str(tmp_path), TQDM_DISABLE="1").splitlines()[-1])
    assert (said["on meta"] > 0) == (page in OFFLOADED), said
    assert said["parameters"]


def test_every_page_that_shows_a_program_is_run():
    pages = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
    shown = {page: programs(page) for page in pages}
    assert {page for page, found in shown.items() if found} == GIVEN.keys()
    every = [program for found in shown.values() for program in found.values()]
    assert all(any(words in program for program in every) for words in NOT_RUN)
