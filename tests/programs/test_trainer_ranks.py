"""The Trainer on two ranks of a CPU, as ``accelerate launch`` starts them from a config file.

tests/programs/train_ranks.py trains a 4-bit and an INT8 LoRA model (DDP over gloo) and saves; each rank is a process
of its own that the entry point of bitsandbytes repairs. To resume, the ranks are forks (:mod:`.forks`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processor import ROOT
from tests.programs.models import save_qwen2

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: {type}
use_cpu: true
num_machines: 1
num_processes: 2
main_process_port: 0
mixed_precision: 'no'
"""
WORKER = ROOT / "tests" / "programs" / "train_ranks.py"
pytestmark = pytest.mark.release("two ranks train the same layers in test_fsdp2*.py, one process in test_trainer.py")
BITS = pytest.mark.parametrize("bits", ["4", "8"], ids=["4bit", "int8"])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("models") / "qwen2", layers=1)


@pytest.fixture(scope="module")
def launch(repaired, model, tmp_path_factory):
    """Launch the worker; the answer of each rank, and the folder it wrote to."""

    def run(distributed_type: str, batch: int, *options: str) -> tuple[list[dict], Path]:
        out = tmp_path_factory.mktemp("ranks")
        config = out / "accelerate.yaml"
        config.write_text(CONFIG.format(type=distributed_type))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        done = subprocess.run([*command, str(WORKER), str(out), str(model), str(batch), *options],
                              capture_output=True, text=True, env=repaired, timeout=280)  # fmt: skip
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
        return [json.loads(path.read_text()) for path in sorted(out.glob("?.json"))], out

    return run


@pytest.fixture(scope="module")
def two(launch) -> tuple[list[dict], Path]:
    """Four steps on two ranks, two rows each. For this type accelerate starts torchrun, on a CPU too."""
    return launch("MULTI_GPU", 2, "--compile")


@pytest.fixture(scope="module")
def resumed(two, two_ranks, model, tmp_path_factory) -> list[dict]:
    """The last two of them, in new processes that compile nothing."""
    return two_ranks(WORKER, tmp_path_factory.mktemp("resumed"), str(model), "2", "--resume", str(two[1]))


@pytest.fixture(scope="module")
def alone(launch) -> dict:
    """Four steps in one process, four rows each. (The config asks for two: see README, "More than one process".)"""
    answers, _ = launch("MULTI_CPU", 4)
    assert len(answers) == 1, "accelerate starts ranks for MULTI_CPU now: say so in README, and use 'NO' here"
    return answers[0]


@BITS
def test_every_rank_is_repaired_alike(two, bits):
    first, second = (answer[bits] for answer in two[0])
    assert first["backend"] == "gloo" and first["ranks"] == 2
    assert first["distributed"] == "DistributedType.MULTI_CPU"
    assert first == second, "states, losses and graphs"
    assert first["states"]["bitsandbytes-bias-written-in-forward"] == "applied"


def test_a_rank_compiles_its_model_whole(two):
    assert [answer["4"]["graphs"] for answer in two[0]] == [1, 1]


@BITS
def test_two_ranks_train_as_one_process_on_the_same_rows(two, alone, bits):
    ranks, one = two[0][0][bits], alone[bits]
    assert one["ranks"] == 1 and one["distributed"] == "DistributedType.NO"
    # bfloat16 sums in another order: 1e-5. Half of the rows: 5e-3 and more, and 5e-4 in the evaluation.
    assert ranks["losses"] == pytest.approx(one["losses"], rel=5e-5)
    assert ranks["eval losses"] == pytest.approx(one["eval losses"], rel=5e-5)


@BITS
def test_what_rank_0_saved_is_what_every_rank_has(two, bits):
    answers, out = two
    assert [answer[bits]["adapter loaded again"] for answer in answers] == [0, 0]
    assert {path.name for path in (out / bits / "checkpoint-2").glob("rng*")} == {"rng_state_0.pth", "rng_state_1.pth"}


@BITS
def test_resumed_in_a_new_launch_equals_the_uninterrupted_run(two, resumed, bits):
    whole = two[0][0][bits]
    assert len(set(whole["losses"].values())) == 4 and set(whole["eval losses"]) == {"2", "4"}
    for answer in resumed:
        assert answer[bits]["losses"] == whole["losses"] and answer[bits]["eval losses"] == whole["eval losses"]


@pytest.fixture(scope="module")
def resumed_alone(launch, two) -> dict:
    """The last two steps of two ranks, in one process that has all four rows."""
    answers, _ = launch("MULTI_CPU", 4, "--resume", str(two[1]))
    return answers[0]


@BITS
def test_resumed_on_another_number_of_ranks_goes_on_as_the_uninterrupted_run(two, resumed_alone, bits):
    whole, alone = two[0][0][bits], resumed_alone[bits]
    assert whole["ranks"] == 2 and alone["ranks"] == 1
    assert {step: alone["losses"][step] for step in "12"} == {step: whole["losses"][step] for step in "12"}, "read"
    assert alone["losses"] == pytest.approx(whole["losses"], rel=5e-5)
    assert alone["eval losses"] == pytest.approx(whole["eval losses"], rel=5e-5)
