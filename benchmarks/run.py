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
from concurrent.futures import ThreadPoolExecutor
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
    cases: Sequence[Case],
    size: Size,
    configurations: Sequence[Configuration],
    *,
    device: str,
    dtype: str,
    backend: str,
    rounds: int,
    steps: int,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, dict[str, dict[str, Any]]]]:
    """Measure ``cases`` in each of ``configurations``; what is known so far, after the first steps and each round.

    The first steps, which compile, run one after the other for one case, and all at once for several: then they share
    the processor, and only the rounds are measured alone.

    Yields, by the name of the case and that of the configuration: ``seconds`` and ``cpu_s`` (the median step of each
    round), ``first_s`` and ``first_cpu_s``, ``graphs``, ``breaks``, ``eager_frames``, ``peak_mib``, ``loss``,
    ``versions``, ``applied``, and ``limit`` if eager (see :meth:`Worker.finish`); or ``error``.
    """
    keys = [(case, c) for case in cases for c in configurations]
    results: dict[str, dict[str, dict[str, Any]]] = {case.name: {} for case in cases}
    with tempfile.TemporaryDirectory(prefix="bnb-patches-bench-") as name:
        folder = Path(name)
        with _processes(folder, [c for _, c in keys]) as started:
            processes = dict(zip(keys, started))
            answer = started[0]("save", str(folder / "model"), vars(size))
            if "error" in answer:
                raise RuntimeError(f"the model could not be saved: {answer['error']}")

            def begin(key: tuple[Case, Configuration]) -> dict[str, Any]:
                tell(f"{key[0].name}: {key[1].name}: the first step")
                return _begin(processes[key], Job(key[0], size, key[1], device, dtype, backend, str(folder / "model")))

            with ThreadPoolExecutor(len(keys) if len(cases) > 1 else 1) as pool:
                for (case, c), result in zip(keys, pool.map(begin, keys)):
                    results[case.name][c.name] = result
            alive = [(case, c) for case, c in keys if "error" not in results[case.name][c.name]]
            for case, c in alive:
                results[case.name][c.name].update(seconds=[], cpu_s=[])
            yield results
            for turn in range(rounds):
                tell(f"{', '.join(case.name for case in cases)}: round {turn + 1} of {rounds}")
                # forth and back, so that none always follows the same other
                for case, c in alive if turn % 2 == 0 else reversed(alive):
                    answer, result = processes[case, c]("steps", steps), results[case.name][c.name]
                    if "error" in answer:
                        result["error"] = answer["error"]
                    else:
                        for key in ("seconds", "cpu_s"):
                            result[key].append(statistics.median(answer[key]))
                yield results
            for case, c in alive:
                results[case.name][c.name].update(processes[case, c]("finish"))
            yield results


def ratio(results: dict[str, dict[str, Any]], above: str, below: str, key: str = "seconds") -> float | None:
    """Step time of one configuration over that of another: the median over rounds, each within its round.

    ``key`` "cpu_s": of the processor's time, which other work on the machine disturbs less.
    """
    one, other = (results.get(name, {}) for name in (above, below))
    if "error" in one or "error" in other or not one.get(key) or not other.get(key):
        return None
    return statistics.median(a / b for a, b in zip(one[key], other[key]))


@contextlib.contextmanager
def _processes(folder: Path, configurations: Sequence[Configuration]) -> Iterator[list[Process]]:
    """A process for each of ``configurations``, in their order."""
    processes: list[Process] = []
    try:
        for number, c in enumerate(configurations):
            # an empty cache for each: the first step is the first step of a user
            cache = str(folder / f"inductor{number}")
            processes.append(Process(folder / f"{number}.log", c.folder, TORCHINDUCTOR_CACHE_DIR=cache))
        yield processes
    finally:
        for process in processes:
            process.end()


def _begin(process: Process, job: Job) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for command in (("job", job.to_dict()), ("start",), ("first",), ("settle", 2)):
        result.update(process(*command))
        if "error" in result:
            break
    return result
