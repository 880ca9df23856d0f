"""Twenty architectures, and five by seed: with the plugin each is as right as ``docs/architectures.json`` says.

``make check`` runs two of the twenty, and the five. ``make architectures`` runs all that there are. ``ARCHITECTURES_SEED=7`` draws other five.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytest.importorskip("transformers", minversion="5.23", reason="the mappings of the newest transformers are walked")
if sys.platform != "linux":
    pytest.skip("each runs in a fork", allow_module_level=True)

from tests.apart import found_now  # noqa: E402
from tools.docs.architectures import RESULTS, is_judged, wrong_steps  # noqa: E402

from .found import MAPPINGS, Architecture, everything, some  # noqa: E402

KNOWN = json.loads(RESULTS.read_text("utf-8"))


@functools.cache
def judged() -> list[Architecture]:
    """Not while tests are collected: every worker would walk all mappings of transformers."""
    return [each for each in everything() if is_judged(KNOWN.get(str(each), {}).get("patched", {"not built": ""}))]


@functools.cache
def fixed() -> list[Architecture]:
    return some(judged(), 20, seed=0)


def drawn() -> list[Architecture]:
    others = [each for each in judged() if each not in fixed()]
    return some(others, 5, seed=int(os.environ.get("ARCHITECTURES_SEED", "1")))


def test_the_judge_can_say_no():
    longt5 = next(str(each) for each in everything() if each.class_name == "LongT5ForConditionalGeneration")
    assert ("4 bits", "forward") in wrong_steps(found_now("architectures", "unpatched", longt5)[longt5])


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(lambda: [*fixed()[:2], *drawn()], id="two and drawn"),
        pytest.param(lambda: fixed()[2:], id="the other eighteen", marks=pytest.mark.release("two, and five by seed")),
    ],
)
def test_as_right_as_known(chosen: Callable[[], list[Architecture]]):
    worse = {}
    for name, found in found_now("architectures", *map(str, chosen())).items():
        known = wrong_steps(KNOWN[name]["patched"])
        wrong = {place: text for place, text in wrong_steps(found).items() if place not in known}
        if wrong or not is_judged(found):
            worse[name] = wrong or found
    assert worse == {}


def test_every_mapping_is_walked():
    assert {each.purpose for each in everything()} == MAPPINGS.keys()
    assert {each.purpose for each in judged()} == MAPPINGS.keys()
