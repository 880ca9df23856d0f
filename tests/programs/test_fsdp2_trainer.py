"""FSDP2 as users launch it, by the Trainer: two ranks, gloo, CPU; see fsdp2_trainer.py for what is not as on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

import patches
from tests.programs.models import save_llama

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

WORKER = Path(__file__).with_name("fsdp2_trainer.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_llama(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def ranks(model, torchrun, tmp_path_factory) -> list[dict]:
    return torchrun(WORKER, tmp_path_factory.mktemp("ranks"), str(model))


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory) -> dict[str, list[float]]:
    """The losses of one process that has all rows."""
    from tests.programs import fsdp2_trainer as program

    with patches.applied():
        return {
            kind: program.losses(program.train(kind, model, tmp_path_factory.mktemp("whole"))) for kind in program.KINDS
        }


@pytest.mark.parametrize("state_dict", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_trained_saved_and_resumed(kind, state_dict, ranks, expected):
    for rank in (answer[kind][state_dict] for answer in ranks):
        assert rank["distributed"].endswith("FSDP, version 2") and rank["parameters"] == ["DTensor"]
        assert rank["losses"] == pytest.approx(expected[kind], abs=2e-5)
        assert rank["adapter loaded again"] < 1e-5
        assert rank["resumed"] == rank["losses"], "to the same end as without a stop"


def test_int8_without_the_patches(model, torchrun, tmp_path):
    with pytest.raises(AssertionError, match="has no attribute 'CB'"):
        torchrun(WORKER, tmp_path, str(model), "int8", PATCHES_AUTOLOAD="0")
