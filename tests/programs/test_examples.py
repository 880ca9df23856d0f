"""The examples do what their docstrings say; one is started as a user starts it, the others in forks (:mod:`.forks`)."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from packaging.version import Version

from tests import forks
from tests.processor import ROOT

EXAMPLES = ROOT / "examples"
BNB = Version(version("bitsandbytes"))


def run(name: str, *arguments: str, new: bool = False) -> str:
    """Run ``examples/<name>``, in a new process if so; return what it printed. It must end with 0."""
    command = [str(EXAMPLES / name), *arguments]
    if new:
        result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600)
    else:
        (result,) = forks.run(forks.Program(command, dict(os.environ)), timeout=600)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.parametrize(
    "kind, error, checkpointing",
    [
        pytest.param("bf16", "expected device meta but got cpu", (), marks=pytest.mark.release("int8 runs it")),
        ("int8", "Cannot access accelerator device", ("--reentrant",)),
        pytest.param(
            "nf4", "Cannot copy out of meta tensor", (), marks=pytest.mark.release("int8; test_does_not_fit runs nf4")
        ),
    ],
)
def test_offload_lora(kind, error, checkpointing):
    small = ("--steps", "6", "--layers", "2", "--hidden", "64", "--batch", "2")
    said = run("offload_lora.py", "--device", "cpu", "--kind", kind, *small, *checkpointing)
    without, _, with_plugin = said.partition("With the plugin:")
    assert error in without
    assert "gradients of 28 LoRA tensors, offloaded against not: largest difference 0.0" in with_plugin
    assert "loaded again, offloaded against not: largest difference 0.0" in with_plugin
    assert "merged, offloaded against not: largest difference 0.0" in with_plugin
    assert "patches are applied in this process" in with_plugin


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.release("nf4 runs the same program"))])
def test_does_not_fit(kind):
    small = ("--steps", "12", "--layers", "4")
    said = run("does_not_fit.py", "--device", "cpu", "--kind", kind, *small)
    size, away = map(float, re.search(r"takes ([\d.]+) MB.* ([\d.]+) MB lie on the disk", said).groups())
    assert 0 < away < size
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", said).groups())
    assert last < first
    assert "loaded again" in said and "merged" in said  # both within rounding, or it had not ended with 0


@pytest.mark.parametrize("kind", ["int8", pytest.param("nf4", marks=pytest.mark.release("int8 runs the same program"))])
def test_flux(kind):
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    if kind == "int8" and BNB < Version("0.48"):
        pytest.skip("with bitsandbytes before 0.48 an INT8 image model stays refused on a machine without a GPU")
    said = run("flux.py", "--device", "cpu", "--kind", kind, "--steps", "12", "--layers", "1")
    size, away = map(float, re.search(r"takes ([\d.]+) MB: ([\d.]+) MB lie on the disk", said).groups())
    assert size / 2 < away < size
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", said).groups())
    assert last < first
    assert "loaded again" in said and "fused" in said  # both within rounding, or it had not ended with 0


@pytest.mark.release("test_offload_lora is its first part, and test_compile_matrix.py compiles the same step")
@pytest.mark.skipif(BNB < Version("0.50"), reason="constraints.txt gives `make demo` the newest bitsandbytes")
def test_demo():
    said = run("demo.py", new=True)
    assert len(said.splitlines()) <= 40
    assert max(map(len, said.splitlines())) <= 112
    assert "Some modules are dispatched on the CPU or the disk." in " ".join(said.split())
    assert re.search(r"with +1 graph, 0 graph breaks", said)


def test_the_demo_computes_in_what_the_processor_has(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    common = importlib.import_module("common")
    assert common.has_bf16("flags : fpu avx2 avx512f avx512_bf16 amx_tile")
    assert common.has_bf16("Features : fp asimd bf16")
    assert not common.has_bf16("flags : fpu avx2 avx512f avx512bw")
    assert not common.has_bf16("")


@pytest.mark.release("test_compile_matrix.py compiles the same step; `make demo-compile` is this program")
def test_qlora_compile():
    said = run("qlora_compile.py", "--device", "cpu", "--steps", "3", "--hidden", "64", "--batch", "2", new=True)
    without, _, with_plugin = said.partition("With the plugin:")
    # One write came with 0.49.0 and went with 0.50.0; 0.46 makes another, that of bitsandbytes-linear4bit-compute-dtype.
    assert ("Attribute 'dtype'" in without) == (Version("0.49") <= BNB < Version("0.50"))
    assert ("Attribute 'compute_type_is_set'" in without) == (BNB < Version("0.47"))
    assert "weights quantized from torch.bfloat16, computed in torch.float32" in with_plugin
    assert "gradients of 28 LoRA tensors, compiled against eager: largest relative difference 0.0" in with_plugin


@pytest.mark.skipif(
    Version(version("transformers")) < Version("5"),
    reason="transformers 4 keeps experts as layers, nothing to quantize",
)
def test_experts():
    said = run("experts.py", "--device", "cpu", "--steps", "5", "--hidden", "64", "--experts", "4", "--batch", "1")
    before, after = map(float, re.search(r"parameters: (\S+) MB with load_in_4bit, (\S+) MB", said).groups())
    assert after < 0.6 * before
    assert "LoRA trains 8 tensors of experts" in said
    first, last = map(float, re.search(r"loss (\S+) -> (\S+) nats", said).groups())
    assert last < first
    assert "loaded again, it generates the same" in said
