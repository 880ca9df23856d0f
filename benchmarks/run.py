"""Running the configurations of a case side by side: one works, the others wait, in alternating order."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .cases import Case, Configuration, Job, Size

ROOT = Path(__file__).parent.parent


def environment(folder: str = "", **more: str) -> dict[str, str]:
    """That of a process which finds the bitsandbytes in ``folder`` first, and this checkout."""
    path = [folder, str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PATCHES_AUTOLOAD": "0",
        "PYTHONDONTWRITEBYTECODE": "",  # an installed package has its bytecode
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        **more,
    }


class Process:
    """The other end of :mod:`benchmarks.worker`."""

    def __init__(self, log: Path, folder: str = "", **environ: str) -> None:
        self.log = log
        with log.open("w") as stderr:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment(folder, **environ),
                cwd=ROOT,
            )

    def __call__(self, *command: Any) -> dict[str, Any]:
        """Give a command and wait for its answer. That of a process that died has an ``error``."""
        assert self._popen.stdin and self._popen.stdout
        try:
            print(json.dumps(command), file=self._popen.stdin, flush=True)
            line = self._popen.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        tail = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return {"error": f"the process ended with {self._popen.wait()}: {''.join(tail)[:300]}"}

    def end(self) -> None:
        assert self._popen.stdin
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(10)
        self._popen.kill()
        self._popen.wait()


def measure(
    case: Case,
    size: Size,
    configurations: Sequence[Configuration],
    *,
    device: str,
    dtype: str,
    backend: str,
    rounds: int,
    steps: int,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """Measure ``case`` in each of ``configurations``.

    Returns, by the name of the configuration: ``seconds`` and ``cpu_s`` (the median step of each round),
    ``first_s`` and ``first_cpu_s``, ``graphs``, ``breaks``, ``eager_frames``, ``peak_mib``, ``loss``, ``versions``,
    ``applied``, and ``limit`` if eager (see :meth:`Worker.finish`); or ``error``.
    """
    with tempfile.TemporaryDirectory(prefix="bnb-patches-bench-") as name:
        folder = Path(name)
        with _processes(folder, configurations) as processes:
            answer = processes[configurations[0].name]("save", str(folder / "model"), vars(size))
            if "error" in answer:
                raise RuntimeError(f"the model could not be saved: {answer['error']}")
            results: dict[str, dict[str, Any]] = {}
            for c in configurations:
                tell(f"{case.name}: {c.name}: the first step")
                job = Job(case, size, c, device, dtype, backend, str(folder / "model"))
                results[c.name] = _begin(processes[c.name], job)
            alive = [c.name for c in configurations if "error" not in results[c.name]]
            for name in alive:
                results[name].update(seconds=[], cpu_s=[])
            for turn in range(rounds):
                tell(f"{case.name}: round {turn + 1} of {rounds}")
                # forth and back, so that none always follows the same other
                for name in alive if turn % 2 == 0 else reversed(alive):
                    answer = processes[name]("steps", steps)
                    if "error" in answer:
                        results[name]["error"] = answer["error"]
                    else:
                        for key in ("seconds", "cpu_s"):
                            results[name][key].append(statistics.median(answer[key]))
            for name in alive:
                results[name].update(processes[name]("finish"))
    return results


def ratio(results: dict[str, dict[str, Any]], above: str, below: str, key: str = "seconds") -> float | None:
    """Step time of one configuration over that of another: the median over rounds, each within its round.

    ``key`` "cpu_s": of the processor's time, which other work on the machine disturbs less.
    """
    one, other = (results.get(name, {}) for name in (above, below))
    if "error" in one or "error" in other or not one.get(key) or not other.get(key):
        return None
    return statistics.median(a / b for a, b in zip(one[key], other[key]))


@contextlib.contextmanager
def _processes(folder: Path, configurations: Sequence[Configuration]) -> Iterator[dict[str, Process]]:
    processes: dict[str, Process] = {}
    try:
        for number, c in enumerate(configurations):
            # an empty cache for each: the first step is the first step of a user
            cache = str(folder / f"inductor{number}")
            processes[c.name] = Process(folder / f"{number}.log", c.folder, TORCHINDUCTOR_CACHE_DIR=cache)
        yield processes
    finally:
        for process in processes.values():
            process.end()


def _begin(process: Process, job: Job) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for command in (("job", job.to_dict()), ("start",), ("first",), ("settle", 2)):
        result.update(process(*command))
        if "error" in result:
            break
    return result
