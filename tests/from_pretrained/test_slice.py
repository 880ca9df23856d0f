"""A slice of the product, by seed: with the plugin every rule is kept. ``python -m tests.from_pretrained`` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")

import patches  # noqa: E402

from .programs import MODELS, SKIPS, everything, some  # noqa: E402
from .runner import outcome, quiet  # noqa: E402

COUNT = 40
REST = [pytest.param(each, marks=pytest.mark.release("forty of them")) for each in some(80)[COUNT:]]
FEW = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet()
    return tmp_path_factory.mktemp("from_pretrained")


@pytest.mark.parametrize("program", [*some(COUNT), *REST], ids=str)
def test_every_rule_is_kept(folder, program):
    with patches.applied():
        assert outcome(program, folder) == []


def test_without_the_plugin_rules_are_broken(folder):
    """The judge can say no: of the first programs the installed transformers breaks some."""
    assert [program for program in some(FEW) if outcome(program, folder / "unpatched")]


def test_the_product_has_every_model_and_name():
    programs = list(everything())
    assert {program.model for program in programs} == MODELS.keys() == SKIPS.keys()
    assert len(programs) == sum(map(len, SKIPS.values())) * 2 * 3 * 3
    assert {program.model for program in some(COUNT)} == MODELS.keys()
