"""Twenty architectures, and five by seed: with the plugin each is as right as ``docs/architectures.json`` says.

``make architectures`` runs all of them. ``ARCHITECTURES_SEED=7`` draws other five.
"""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytest.importorskip("transformers", minversion="5.23", reason="the mappings of the newest transformers are walked")
if sys.platform != "linux":
    pytest.skip("each runs in a fork", allow_module_level=True)

import patches  # noqa: E402
from tools.docs.architectures import is_judged, wrong_steps  # noqa: E402

from .__main__ import apart, read  # noqa: E402
from .found import MAPPINGS, Architecture, everything, some  # noqa: E402

KNOWN = read()
JUDGED = [each for each in everything() if is_judged(KNOWN.get(str(each), {}).get("patched", {"not built": ""}))]
FIXED = some(JUDGED, 20, seed=0)
DRAWN = some([each for each in JUDGED if each not in FIXED], 5, seed=int(os.environ.get("ARCHITECTURES_SEED", "1")))


def test_the_judge_can_say_no():
    longt5 = next(each for each in everything() if each.class_name == "LongT5ForConditionalGeneration")
    assert ("4 bits", "forward") in wrong_steps(apart(longt5))


@pytest.mark.parametrize("chosen", [FIXED, DRAWN], ids=["fixed", "drawn"])
def test_as_right_as_known(chosen: list[Architecture]):
    with patches.applied():  # once: each runs in a fork
        results = {architecture: apart(architecture) for architecture in chosen}
    worse = {}
    for architecture, found in results.items():
        known = wrong_steps(KNOWN[str(architecture)]["patched"])
        wrong = {place: text for place, text in wrong_steps(found).items() if place not in known}
        if wrong or not is_judged(found):
            worse[str(architecture)] = wrong or found
    assert worse == {}


def test_every_mapping_is_walked():
    assert {each.purpose for each in everything()} == MAPPINGS.keys()
    assert {each.purpose for each in JUDGED} == MAPPINGS.keys()
