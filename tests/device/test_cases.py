"""Runs the cases, each group in a fresh process that has the simulated device: see :mod:`tests.device`.

The device must be there before torch is imported, and it stays, so that no other test can share its process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import device as simulated
from tests.device import build

ROOT = Path(__file__).parents[2]
LAYERS = ("device", "moves", "offload", "memory", "faults")
MODELS = (
    "models", "adapters", "settled", "experts", "loading", "loading_maps", "loading_memory", "loading_models", "bytes",
    "image_models", "diffusers", "diffusers_groups",
)  # fmt: skip
SUITE = (
    "accelerate", "bitsandbytes/layers/test_bias_written_in_forward.py",
    *(f"bitsandbytes/four_bit/test_params4bit_{name}.py" for name in ("chunk", "copies", "copies_offloaded", "copies_pickle", "meta")),
    *(f"bitsandbytes/four_bit/test_linear4bit_{name}.py" for name in ("load_state_dict", "meta_moves")),
    *(f"bitsandbytes/int8/test_{name}.py" for name in ("backward_live_state", "copies", "plain_weight")),
    "bitsandbytes/int8/test_scales_lost_on_offload.py",
)  # fmt: skip
"""Tests that take the ``device`` fixture, less those that compile: Inductor cannot write for this device."""

FLOWS = ("peft/test_merge_offloaded.py", "accelerate/test_prepare_moves_offloaded_trainer.py")
"""Of models offloaded before LoRA: what is different where the execution device is not that of the offloaded weights."""


def cases(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/device/cases_{name}.py" for name in names)


GROUPS = {
    "cuda": ("cuda", *cases(*LAYERS, *MODELS)),
    "cuda-suite": (
        "cuda",
        "-k",
        "cuda and (trainer or tied or not merge_offloaded)",
        *(f"tests/repairs/{name}" for name in SUITE),
        *(f"tests/repairs/{name}" for name in FLOWS),
    ),
    "sim-layers": ("sim", *cases(*LAYERS)),
}
"""The form of the device, and the arguments of pytest. Models ask for "cuda" by name nearly everywhere."""
AT_A_RELEASE = {
    "sim-layers": "the same cases as cuda",
    "cuda-suite": "these tests on the CPU, and the cases of cuda on the device",
}


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """The device, built if it is not yet: 20 s of a processor, once for all releases."""
    try:
        build.library()
    except build.CannotBuild as reason:
        pytest.skip(str(reason))


def test_every_case_is_in_a_group():
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/device/cases_*.py")}
    assert files == {name for group in GROUPS.values() for name in group if "cases_" in name}


def test_every_file_of_a_group_is_there():
    assert not [name for group in GROUPS.values() for name in group if "/" in name and not (ROOT / name).exists()]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "group",
    [
        pytest.param(each, marks=[pytest.mark.release(AT_A_RELEASE[each])] if each in AT_A_RELEASE else [])
        for each in GROUPS
    ],
)
def test_on_the_simulated_device(group, pytestconfig):
    kind, *arguments = GROUPS[group]
    options = ["-q", "--tb=short", "-p", "no:xdist", "-p", "no:cacheprovider"]
    if pytestconfig.getoption("markexpr"):
        options += ["-m", pytestconfig.getoption("markexpr")]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ[simulated.VARIABLE] = kind
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        run = f"{simulated.VARIABLE}={kind} {' '.join(command)}"
        pytest.fail(f"{run}\n{done.stdout[-20000:]}\n{done.stderr}", pytrace=False)
