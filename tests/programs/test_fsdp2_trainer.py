"""FSDP2 as users launch it, by the Trainer: two ranks, gloo, CPU; see fsdp2_trainer.py for what is not as on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

import patches
from patches.engine import gate
from tests.programs.models import save_llama
from tests.releases import selected

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

WORKER = Path(__file__).with_name("fsdp2_trainer.py")
FOUR_BIT = gate.satisfied("bitsandbytes>=0.47")
"""Before, no 4-bit layer whose codes are stored as another dtype than uint8 can be dequantized on a CPU."""
KINDS = ("nf4", "int8") if FOUR_BIT else ("int8",)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_llama(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def kinds(request) -> list[str]:
    return [kind for kind in selected(request, "kind") if kind in KINDS]


@pytest.fixture(scope="module")
def ranks(model, two_ranks, tmp_path_factory, kinds) -> list[dict]:
    return two_ranks(WORKER, tmp_path_factory.mktemp("ranks"), str(model), *kinds)


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory, kinds) -> dict[str, list[float]]:
    """The losses of one process that has all rows."""
    from tests.programs import fsdp2_trainer as program

    with patches.applied():
        return {kind: program.losses(program.train(kind, model, tmp_path_factory.mktemp("whole"))) for kind in kinds}


@pytest.mark.parametrize("state_dict", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize(
    "kind", ["nf4", pytest.param("int8", marks=pytest.mark.release("test_fsdp2.py and tests/distributed"))]
)
def test_trained_saved_and_resumed(kind, state_dict, ranks, expected):
    if kind not in KINDS:
        pytest.skip("before 0.47 codes that are stored as float32 cannot be dequantized on a CPU")
    for rank in (answer[kind][state_dict] for answer in ranks):
        assert rank["distributed"].endswith("FSDP, version 2") and rank["parameters"] == ["DTensor"]
        # A sum in another order can move an INT8 code of an activation by one: 4e-5 of a loss here.
        assert rank["losses"] == pytest.approx(expected[kind], abs=1e-4)
        assert rank["adapter loaded again"] < 1e-5
        assert rank["resumed"] == rank["losses"], "to the same end as without a stop"


@pytest.mark.release("tests/distributed loads models and optimizers that other numbers of ranks saved")
def test_resumed_on_another_number_of_ranks(model, two_ranks, tmp_path):
    """What two ranks saved after two steps, on one rank; optimizers of bitsandbytes have states of 8 bits here."""
    kinds = [kind for kind in ("nf4", "nf4-8bit", "int8", "int8-8bit") if kind[:4] in KINDS]
    if not gate.satisfied("bitsandbytes>=0.50"):  # before, none of its optimizers steps on a CPU
        kinds = [kind for kind in kinds if not kind.endswith("-8bit")]
    two = two_ranks(WORKER, tmp_path / "two", str(model), *kinds)[0]
    (one,) = two_ranks(WORKER, tmp_path / "one", str(model), "--resume", str(tmp_path / "two"), *kinds, ranks=1)
    for kind in kinds:
        for state_dict, answer in two[kind].items():
            losses = one[kind][state_dict]["losses"]
            assert losses[:2] == answer["losses"][:2], "read, not trained again"
            assert losses == pytest.approx(answer["losses"], abs=1e-4), (kind, state_dict)


@pytest.mark.release("verify, which shows this defect without its patch")
def test_int8_without_the_patches(model, two_ranks, tmp_path):
    with pytest.raises(AssertionError, match="has no attribute 'CB'"):
        two_ranks(WORKER, tmp_path, str(model), "int8", PATCHES_AUTOLOAD="0")
