"""Ten image models, and one by seed: with the plugin each is as right as ``docs/image_models.json`` says.

``make check`` runs one of the ten, and the one by seed. ``make image-models`` runs all that there are. ``IMAGE_MODELS_SEED=7`` draws another.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytest.importorskip("diffusers", minversion="0.42", reason="the classes of the newest diffusers are walked")
if sys.platform != "linux":
    pytest.skip("each runs in a fork", allow_module_level=True)

from tests.apart import found_now, worse  # noqa: E402
from tools.docs.architectures import is_judged, wrong_steps  # noqa: E402
from tools.docs.image_models import RESULTS  # noqa: E402

from .found import FOLDERS, TABLE, USED_MOST, classes  # noqa: E402

KNOWN = json.loads(RESULTS.read_text("utf-8"))
FIXED = [f"transformer: {name}" for name in USED_MOST[:10]]


def judged() -> list[str]:
    return [name for name, entry in KNOWN.items() if is_judged(entry.get("patched", {"not built": ""}))]


def drawn() -> list[str]:
    others = [name for name in judged() if name not in FIXED]
    return random.Random(int(os.environ.get("IMAGE_MODELS_SEED", "1"))).sample(others, 1)


def test_the_judge_can_say_no():
    flux = FIXED[0]
    assert ("NF4", "unfused") in wrong_steps(found_now("image_models", "unpatched", flux)[flux])


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(lambda: [FIXED[0], *drawn()], id="one and drawn"),
        pytest.param(lambda: FIXED[1:], id="the other nine", marks=pytest.mark.release("one, and one by seed")),
    ],
)
def test_as_right_as_known(chosen: Callable[[], list[str]]):
    not_so = {}
    for name, found in found_now("image_models", *chosen()).items():
        known = wrong_steps(KNOWN[name]["patched"])
        wrong = {place: text for place, text in wrong_steps(found).items() if place not in known}
        if wrong or not is_judged(found):
            not_so[name] = wrong or found
    assert not_so == {}


def test_none_is_worse_with_the_plugin():
    assert {name: places for name, entry in KNOWN.items() if (places := worse(entry, wrong_steps))} == {}


def test_every_class_is_in_the_tables():
    names = [name.partition(": ")[2] for name in classes()]
    assert sorted(names) == sorted(TABLE)
    assert KNOWN.keys() == classes().keys()
    assert {name.partition(":")[0] for name in judged()} == FOLDERS.keys()
