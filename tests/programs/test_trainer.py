"""The Trainer as users launch it: ``accelerate launch`` with a config file, compiled, checkpointed, resumed.

tests/programs/train.py trains, evaluates on the way, saves, merges and loads again; each run is a process of its own
that the entry point of bitsandbytes repairs. They are forks (:mod:`.forks`), the first with the command and the variables
that ``accelerate launch`` starts it with; before a release it is started so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patches.engine import gate
from tests import forks
from tests.processor import ROOT
from tests.programs.models import save_qwen2
from tests.releases import selected

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
use_cpu: true
num_machines: 1
num_processes: 1
mixed_precision: 'no'
"""
BITS = pytest.mark.parametrize("bits", [
    pytest.param("4", id="4bit"),
    pytest.param("8", id="int8", marks=pytest.mark.release("4 bits; test_fsdp2.py trains INT8, test_compile_matrix.py compiles it")),
])  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("models") / "qwen2", layers=1)


@pytest.fixture(scope="module")
def launch(repaired, model, tmp_path_factory):
    """Run the worker in a fork, for ``accelerate launch`` or by it if so; its answers, and the folder it wrote to."""

    def run(bits: str, *former: Path, launched: str = "", **environ: str) -> tuple[dict, Path]:
        out = tmp_path_factory.mktemp("run")
        env = {**repaired, **environ}
        worker = [str(ROOT / "tests" / "programs" / "train.py"), str(out), str(model), bits, *map(str, former)]
        config = out / "accelerate.yaml"
        config.write_text(CONFIG)
        if launched == "by accelerate":
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
            done = subprocess.run(command + worker, capture_output=True, text=True, env=env, timeout=280)
        else:
            if launched:
                worker, more = as_accelerate_would("--config_file", str(config), *worker)
                env |= more
            (done,) = forks.run(forks.Program(worker, env), timeout=280)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
        return json.loads((out / "answer.json").read_text()), out

    return run


def as_accelerate_would(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """What ``accelerate launch`` starts, less the interpreter, and the variables that it sets."""
    from accelerate.commands import launch

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "environ", os.environ.copy())
        options, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(arguments))
        (_, *command), env = launch.prepare_simple_launcher_cmd_env(options)
    return command, {name: value for name, value in env.items() if os.environ.get(name) != value}


@pytest.fixture(scope="module")
def both(request) -> str:
    """Of "4" and "8" what this run selects; before a release both, one model after the other."""
    return "".join(selected(request, "bits")) or "48"


@pytest.fixture(scope="module")
def whole(launch, both) -> tuple[dict, Path]:
    """Six steps without interruption."""
    return launch(both, launched="as by accelerate")


@pytest.mark.release("the same with the command and the variables of the launcher, in a fork")
def test_accelerate_launches_it(whole, launch, both):
    again = launch(both, launched="by accelerate")[0]
    assert "bitsandbytes-bias-written-in-forward" in again.pop("applied"), "which others depends on what is imported"
    assert again == {name: answer for name, answer in whole[0].items() if name != "applied"}


@pytest.fixture(scope="module")
def resumed(whole, launch, both) -> dict:
    """The last three of them, in a new process."""
    return launch(both, whole[1])[0]


@pytest.fixture(scope="module")
def bare(launch) -> dict:
    """The six steps without the patches, of what can be trained so to the end."""
    return launch("8" if gate.satisfied("bitsandbytes<0.47") else "48", PATCHES_AUTOLOAD="0")[0]


@BITS
def test_it_is_launched_repaired_and_compiled(whole, bits):
    answers, _ = whole
    assert answers["launched by accelerate"] and answers[bits]["steps here"] == 6
    assert "bitsandbytes-bias-written-in-forward" in answers["applied"]
    assert answers[bits]["compiled graphs"] == 1, "the evaluations in between are eager and change nothing"


@BITS
def test_the_loss_after_resume_equals_the_uninterrupted_run(whole, resumed, bits):
    """From the checkpoint of step 3, in a new process, with dropout and evaluations in between."""
    answer, again = whole[0][bits], resumed[bits]
    assert again["steps here"] == 3
    assert len(set(answer["losses"].values())) == 6 and set(answer["eval losses"]) == {"2", "4", "6"}
    assert again["losses"] == answer["losses"] and again["eval losses"] == answer["eval losses"]
    for what in ("base", "merged"):
        assert again[what] == answer[what]


@BITS
def test_adapters_and_the_merged_model_are_saved_whole(whole, bits):
    answer, out = whole[0][bits], whole[1] / bits
    assert answer["base"] > 0.5, "training changed the logits by more than quantization does"
    assert answer["adapter loaded again"] == 0
    assert answer["merged"] < {"4": 0.15, "8": 0.02}[bits], "what quantizing the merged weights costs"
    assert answer["merged is quantized"] and answer["merged loaded again"] == 0
    assert (out / "merged" / "model.safetensors").is_file() and (out / "merged" / "config.json").is_file()


@pytest.mark.release("verify, which shows each of these defects without its patch")
@BITS
def test_without_the_patches(request, whole, bits):
    first_int8 = bits == "8" and gate.satisfied("bitsandbytes<0.47")
    if not (first_int8 or gate.satisfied("bitsandbytes>=0.50")):
        pytest.skip("shown on the first and the newest series only: each launch takes half a minute")
    answer, bare = whole[0][bits], request.getfixturevalue("bare")
    assert bare["applied"] == [] and bare[bits]["compiled graphs"] > answer["compiled graphs"] + 2, "it falls to pieces"
    if first_int8:
        assert bare[bits]["losses"] != answer["losses"] and bare[bits]["adapter loaded again"] > 1, "silently wrong"
    else:
        assert bare[bits]["losses"] == answer["losses"], "the repairs change no number of a sound run"
