"""A slice of ``python -m tests.experts.walk``, and what its last run of everything found."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytest.importorskip("peft", minversion="0.19", reason="it adapts experts from 0.19 on")
pytest.importorskip("transformers", minversion="5.23", reason="the release that was walked")

import patches  # noqa: E402
from tests.experts import walk  # noqa: E402

SLICE = ("Inkling2ForCausalLM", "NemotronHForCausalLM", "ZayaForCausalLM")
"""Experts that a converter interleaves; experts without a gate, found by their code alone; a base model with tensors of
its own, which takes a tied embedding to the disk along with its experts."""

NOT_RIGHT = {("JetMoeForCausalLM", "half on disk")}
"""It calls methods of its experts other than forward, for which accelerate brings nothing, in floating point neither."""


@pytest.mark.parametrize("name", SLICE)
def test_a_mixture(name):
    (architecture,) = (each for each in walk.mixtures() if each.class_name == name)
    with patches.applied():
        assert walk.result(architecture) == dict.fromkeys(walk.STEPS, "")


def test_what_the_walk_found():
    found = json.loads(walk.RESULTS.read_text())
    built = {name: steps for name, steps in found.items() if "not built" not in steps}
    wrong = {(name, step) for name, steps in built.items() for step in steps if steps[step]}
    assert wrong == NOT_RIGHT and len(built) > 55 and not any("went dense" in steps for steps in built.values())
