"""What of an older stack `make check` looks at: that each patch fits it, and each defect whose source is another there.

Run by the session ``older`` of nox, with the packages of a stack first on the path. ``make stacks`` runs all reproducers,
each in four phases; here it is two: as installed, and with all patches.
"""

from __future__ import annotations

import functools
import json
import sysconfig
from pathlib import Path

import pytest

import patches
from patches import REGISTRY
from patches.engine import gate, needs
from patches.engine.edits import Edit, module_of
from patches.engine.patch import Part
from patches.engine.report import Status
from patches import verification
from patches.verification import worker
from patches.verification.asking import Asking
from tests import releases
from tests.test_sources import file_of

OF_A_STACK = ("transformers", "peft", "accelerate", "diffusers")
NEWEST = Path(sysconfig.get_path("purelib"))


@functools.cache
def folder_of(package: str) -> Path:
    """Where the stack has it."""
    file = file_of(package)
    assert file is not None, f"{package} is not in this stack"
    return file.parents[1]


def is_other(edit: Edit) -> bool:
    """Whether the stack has another source than the newest release for what ``edit`` stands in."""
    package = module_of(edit).partition(".")[0]
    return package in OF_A_STACK and releases.source(edit, folder_of(package)) != releases.source(edit, NEWEST)


def is_chosen(part: Part) -> bool:
    return gate.check(part).status in (Status.AVAILABLE, Status.NOT_AFFECTED) and any(map(is_other, needs.edits(part)))


ALL = {(patch.id, part.name): part for patch in REGISTRY.patches.values() for part in patch.parts}
CHOSEN = {key: part for key, part in ALL.items() if is_chosen(part)}
FITS = ("", "", "every patch fits")
"""Asked beside the reproducers, in a fork of the same server: to import a stack is what takes the time."""


ELSEWHERE = {
    "transformers-device-map-refused": "accelerate>=1.1",
    "diffusers-device-map-refused": "accelerate>=1.1",
    "diffusers-save-offloaded": "accelerate>=0.31",
    "diffusers-lora-of-narrower-model": "peft>=0.16",
    "diffusers-moves-offloaded": "accelerate>=1.1",
}
"""What a repair needs of another package than its own; where it is older the defect stays, as docs/releases.md says."""


def answer(patch_id: str, part: str, phase: str) -> worker.Answer:
    """In a process of its own: what the reproducer says, or which patches do not fit this stack."""
    if (patch_id, part, phase) != FITS:
        return verification.run_reproducer(patch_id, part, phase)
    for patch in REGISTRY.patches.values():
        REGISTRY.import_targets(patch)
    patches.apply()
    bad = patches.report().with_status(Status.CONFLICT, Status.FAILED, Status.PENDING)
    return bool(bad), json.dumps({each.id: each.reason for each in bad})


@pytest.fixture(scope="module")
def said() -> dict[tuple[str, str, str], worker.Answer]:
    """What each reproducer says in each of the two phases, and whether every patch fits."""
    available = [key for key, part in CHOSEN.items() if gate.check(part).status is Status.AVAILABLE]
    tasks = [FITS, *((*key, "unpatched") for key in CHOSEN), *((*key, "all") for key in available)]
    preload = ["torch", *map(gate.module_name, (*OF_A_STACK, "bitsandbytes"))]
    return dict(zip(tasks, Asking(preload, jobs=2, progress=False)(f"{__name__}:answer", tasks, "defects")))


def test_every_patch_fits(said):
    assert said[FITS] == (False, "{}")


@pytest.mark.parametrize("name, part", CHOSEN)
def test_it_is_there_as_installed_and_absent_with_the_plugin(name, part, said):
    unpatched, figure = said[name, part, "unpatched"]
    if unpatched is None and ("cannot show" in figure or (name, part, "all") not in said):
        pytest.skip(f"this stack has no program for it: {figure}")
    if (name, part, "all") not in said:
        reason = gate.check(CHOSEN[name, part]).reason
        needed = ELSEWHERE.get(name, CHOSEN[name, part].requires[0])
        assert not unpatched or not gate.satisfied(needed), f"{reason}, but: {figure}"
        return
    assert [unpatched, said[name, part, "all"][0]] == [True, False], json.dumps([figure, said[name, part, "all"][1]])


def test_a_stack_changes_something():
    assert len(CHOSEN) > 10
