"""What a run on a GPU does, in the order of what it is worth: where time ends, what is worth least is missing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 9
"""What the limits below are made for; they grow and shrink with what is asked for."""
REST = 10_000


@dataclass(frozen=True)
class Step:
    """A program that writes into ``file`` of the folder for results, all along, or prints there if it is ``printed``."""

    name: str
    text: str
    seconds: float
    """Its limit, of :data:`MINUTES`."""
    file: str
    command: tuple[str, ...]
    """Arguments of Python; ``FILE`` and ``FOLDER`` stand for the file and its folder."""
    rehearsal: tuple[str, ...] = ()
    """The same on a machine without a GPU, where the program has to be small; ``command`` itself if empty."""
    printed: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    simulated: bool = False
    """Whether a rehearsal runs on the simulated accelerator of ``tests/device``."""

    def arguments(self, folder: Path, rehearsed: bool) -> list[str]:
        places = {"FILE": str(folder / self.file), "FOLDER": str(folder)}
        return [places.get(word, word) for word in (rehearsed and self.rehearsal) or self.command]


def steps(jobs: int) -> tuple[Step, ...]:
    """All steps, for a machine of ``jobs`` cores."""
    smoke = ("-m", "tools.gpu.smoke", "FILE")
    fit = ("-m", "benchmarks.does_not_fit", "--output", "FILE")
    training = ("-m", "benchmarks", *"--data-only --no-cost --threads 1 --name training --output FOLDER".split())
    experts = ("-m", "benchmarks.experts_on_device", "--output", "FILE")
    tiny = {"--experts": 8, "--tokens": 64, "--hidden_size": 64, "--moe_intermediate_size": 64, "--num_hidden_layers": 1,
            "--vocab_size": 256, "--rounds": 1}  # fmt: skip
    verify = ("-m", "tools.gpu.verified", "--jobs", str(jobs), "FILE")
    tests = ("-m", "pytest", "-q", "-p", "tools.gpu.each_test")
    workers = ("-n", str(max(1, jobs // 2)), "--dist", "loadfile")
    return (
        Step("smoke", "a 4-bit and an INT8 layer, forward and backward; the device, versions", 40, "smoke.json",
             smoke, (*smoke, "--device", "cpu")),
        Step("report", "what the plugin has changed here", 30, "report.txt",
             ("-m", "patches", "report", "--live", "--all"), printed=True),
        Step("does_not_fit", "a model that does not fit: training, memory, bytes moved", 150, "does_not_fit.json",
             fit, (*fit, "--layers", "4", "--hidden", "128", "--rounds", "1"), simulated=True),
        Step("training", "a step, unpatched and patched, eager and compiled", 190, "training.json",
             (*training, "--size", "large", "--rounds", "5", "--at-once", "4", "*"),
             (*training, "--size", "tiny", "--rounds", "1", "--at-once", "2", "--backend", "aot_eager", "nf4", "int8"),
             environ={"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, jobs // 4))}),
        Step("experts", "experts in 4 bits beside bfloat16", 60, "experts_on_device.json",
             experts, (*experts, "--device", "cpu", *(str(word) for pair in tiny.items() for word in pair))),
        Step("verify", "the reproducer of each patch", 130, "verify.json",
             verify, (*verify, "bitsandbytes-bias-written-in-forward")),
        Step("tests", "the tests that take a device", REST, "tests.jsonl",
             (*tests, *workers, "-k", "cuda or cases_", *with_device()),
             (*tests, "tests/repairs/bitsandbytes/four_bit/test_params4bit_chunk.py")),
    )  # fmt: skip


def with_device() -> Sequence[str]:
    """The files with tests that ask for ``device``."""
    asks = re.compile(r"^ *def test_\w+\([^)]*\bdevice\b", re.MULTILINE)
    files = [*(ROOT / "tests" / "repairs").rglob("test_*.py"), *(ROOT / "tests" / "device").glob("cases_*.py")]
    return [str(file.relative_to(ROOT)) for file in sorted(files) if asks.search(file.read_text("utf-8"))]
