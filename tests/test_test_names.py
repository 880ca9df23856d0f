"""Whoever has a patch finds its tests: a file has the name of its patch, or is about what several patches do together."""

from __future__ import annotations

import re
from pathlib import Path

from patches import REGISTRY

TESTS = Path(__file__).parent
TOGETHER = {
    "bitsandbytes/four_bit/test_replaced_contents.py", "bitsandbytes/int8/test_one_owner.py",
    "bitsandbytes/int8/test_state_dicts.py", "bitsandbytes/int8/test_two_places.py", "diffusers/test_plain_models.py",
    "peft/test_merge.py",
    "peft/test_merge_sharded.py", "peft/test_offloaded_copies.py",
    "peft/test_offloaded_memory.py",
    "torchao/test_executorch.py", "torchao/test_llama_export.py", "trl/test_train_step.py",
    *(f"transformers/test_does_not_fit_{part}.py"
      for part in ("ahead", "ends", "faults", "memory", "models", "releases")),
}  # fmt: skip
"""Files about programs that need several patches. A new file has the name of its patch, and what follows it if there are more."""


def names() -> dict[str, str]:
    """By the path that the tests of a patch have without ``.py``, below ``tests/repairs``: its id."""
    paths = {patch.id: patch.module.split(".")[2:] for patch in REGISTRY.patches.values()}
    return {"/".join([*folder, f"test_{file}"]): patch_id for patch_id, (*folder, file) in paths.items()}


def files() -> set[str]:
    return {path.relative_to(TESTS / "repairs").as_posix() for path in TESTS.glob("repairs/*/**/test_*.py")}


def test_each_file_has_the_name_of_a_patch():
    known = names()
    own = {file for file in files() if any(re.match(rf"{re.escape(name)}(_\w+)?\.py$", file) for name in known)}
    assert files() - own == TOGETHER, "a file of tests is named after the file of its patch: test_<file>[_<more>].py"


def test_each_patch_is_in_the_name_of_a_file_or_named_in_one():
    texts = "\n".join(path.read_text("utf-8") for path in TESTS.rglob("test_*.py") if path.name != "test_contract.py")
    assert not [
        patch_id for name, patch_id in names().items()
        if not any(re.match(rf"{re.escape(name)}(_\w+)?\.py$", file) for file in files())
        and not re.search(rf"\b{patch_id}\b", texts)
    ]  # fmt: skip
