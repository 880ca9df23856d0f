"""The healthy programs have the same result without patches and with all, and would show one changed bit.

Each runs in fresh processes, so that equal digests also say that a program is deterministic. What a stack cannot run, such
as an optimizer of bitsandbytes before 0.50 on a CPU, is skipped.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import patches  # noqa: E402
from patches import Status  # noqa: E402
from patches.adoption.healthy_programs import PROGRAMS  # noqa: E402
from patches.adoption import plain_programs, quantized_programs  # noqa: E402
from patches.verification import worker  # noqa: E402
from patches.verification.asking import Asking  # noqa: E402
from tests import processor, releases  # noqa: E402

PRELOAD = ("torch", "bitsandbytes", "transformers", "peft", "accelerate")
EACH = pytest.mark.parametrize("name", PROGRAMS)
IN_4_BITS = [name for name in PROGRAMS if re.search("4.bit", name)]


def answer(name: str, how: str) -> worker.Answer:
    """In a process of its own: the digest of a program, with all patches or a planted harm."""
    if how == "patched":
        patches.apply()
        assert patches.report().with_status(Status.APPLIED)
    elif how == "one bit":
        change_one_bit()
    return False, PROGRAMS[name]()


def change_one_bit() -> None:
    """Make linear layers return other numbers, by the last bit of a float32."""
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    def planted(original: Any) -> Any:
        return lambda layer, *inputs: original(layer, *inputs) * (1 + 2**-23)

    for kind in (torch.nn.Linear, Linear4bit, Linear8bitLt):
        kind.forward = planted(kind.forward)


def ask(*questions: tuple[str, str]) -> dict[tuple[str, str], worker.Answer]:
    return dict(zip(questions, Asking(PRELOAD, jobs=2, progress=False)(f"{__name__}:answer", questions, "programs")))


@pytest.fixture(scope="module")
def said(request) -> dict[tuple[str, str], worker.Answer]:
    names = releases.selected(request, "name")
    return ask(*((name, how) for name in dict.fromkeys(names) for how in ("unpatched", "patched", "one bit")))


def test_names_are_unique_sentences():
    assert len(PROGRAMS) == len(plain_programs.PROGRAMS) + len(quantized_programs.PROGRAMS)
    assert all(re.fullmatch(r"[a-z]+ [\w ,-]+[a-z0-9]", name) for name in PROGRAMS)


@pytest.mark.one_in(3)
@EACH
def test_patches_change_no_bit_and_one_bit_would_be_seen(name, said):
    present, digest = said[name, "unpatched"]
    if present is None:
        pytest.skip(f"this stack cannot run it: {digest}")
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert said[name, "patched"] == (False, digest)
    assert said[name, "one bit"] != (False, digest)


@pytest.mark.release("the same programs on a processor without AVX512-BF16")
def test_patches_change_no_bit_where_an_evaluation_repacks_weights(monkeypatch):
    monkeypatch.setenv(processor.VARIABLE, processor.WITH_AVX512BF16)
    found = ask(*((name, how) for name in IN_4_BITS for how in ("unpatched", "patched")))
    unpatched, patched = ({name: found[name, how] for name in IN_4_BITS} for how in ("unpatched", "patched"))
    assert patched == unpatched and all(present is False for present, _ in unpatched.values())


@pytest.mark.release("tests/programs/test_checkpointed_step.py")
@pytest.mark.parametrize("load", ["a 4-bit", "an INT8"])
def test_without_patches_checkpointing_changes_no_bit(load):
    """So the results that are compared are the right ones: dropout, gradients and two steps are the same."""
    names = [name for name in PROGRAMS if name.startswith(f"train a LoRA on {load} Llama")]
    found = ask(*((name, "unpatched") for name in names))
    assert len(names) > 1 and len(set(found.values())) == 1
    assert next(iter(found.values()))[0] is False
