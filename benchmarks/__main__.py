"""``python -m benchmarks [CASE ...]``: step times, graphs, first calls and memory, unpatched and patched."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import cost, present, run
from .cases import CASES, MORE, SIZES, Case, configurations
from .setting import processor


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    chosen = _chosen(options.cases)
    device = options.device or _device()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    sizes = [options.size] if options.size else ["small"] if device == "cpu" else ["small", "large"]
    for size in sizes:
        name = options.name or device.partition(":")[0] + (f"-{size}" if size != "small" else "")
        for data in _measure(options, chosen, device, size):
            # after each round, so that an interrupted run has what it did
            present.write(options.output / name, data, "" if options.data_only else present.table(data))
        print(present.table(data))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    first, more = (", ".join(case.name for case in cases) for cases in (CASES, MORE))
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"names or patterns; default {first}; there are {more}, too"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a figure")
    parser.add_argument("--rounds", type=int, help="rounds of all configurations (default 15; quick: 3)")
    parser.add_argument("--steps", type=int, help="steps a round of each (default 3; quick: 1)")
    parser.add_argument("--size", choices=SIZES, help="default small; on a CUDA device small and large")
    parser.add_argument("--device", help="default cuda where there is one, else cpu")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="default bfloat16 on a CUDA device, else float32: "
                        "without bfloat16 instructions one matrix product would be all that is measured")  # fmt: skip
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--threads", type=int, default=_cores(), help="OMP_NUM_THREADS of what is measured")
    parser.add_argument("--only", nargs="+", metavar="CONFIGURATION", help='such as "patched compiled"')
    parser.add_argument("--newest", metavar="FOLDER", help="holds another bitsandbytes, measured unpatched beside")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="cases whose first steps run at once: "
                        "sooner done, on a machine of many cores, but first calls are no figures then")  # fmt: skip
    parser.add_argument("--no-cost", action="store_true", help="leave out what the patches themselves cost")
    parser.add_argument("--name", help="of the files that are written; default that of the device, and the size")
    parser.add_argument("--data-only", action="store_true", help="write no table")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    return parser


def _measure(options: argparse.Namespace, chosen: list[Case], device: str, size: str) -> Iterator[dict[str, Any]]:
    """What is known so far, after each round and at the end."""
    rounds = options.rounds or (3 if options.quick else 15)
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    other, label = _newest(options.newest)
    setups = [c for c in configurations(other, label) if not options.only or c.name in options.only]
    data: dict[str, Any] = {
        "host": _host(device, options.threads),
        "size": size,
        "size_of": vars(SIZES[size]),
        "dtype": dtype,
        "backend": options.backend,
        "rounds": rounds,
        "cases": {},
    }
    data["at_once"] = options.at_once
    for at in range(0, len(chosen), options.at_once):
        cases = chosen[at : at + options.at_once]
        for results in run.measure(
            cases,
            SIZES[size],
            setups,
            device=device,
            dtype=dtype,
            backend=options.backend,
            rounds=rounds,
            steps=options.steps or (1 if options.quick else 3),
            tell=lambda text: print(text, file=sys.stderr, flush=True),
        ):
            for case in cases:
                data["cases"][case.name] = {"text": case.text, "results": results[case.name]}
            yield data
    if not options.no_cost:
        print("what the patches cost", file=sys.stderr)
        data["cost"] = cost.measure(device, rounds=max(3, rounds // 2))
    yield data


def _chosen(patterns: Sequence[str]) -> list[Case]:
    found = [c for p in patterns for c in (*CASES, *MORE) if fnmatch.fnmatch(c.name, p)] if patterns else list(CASES)
    if not found:
        sys.exit(f"no case is named {' or '.join(patterns)}; there are {', '.join(c.name for c in (*CASES, *MORE))}")
    return list(dict.fromkeys(found))


def _newest(folder: str | None) -> tuple[str, str]:
    """The folder and its label; nothing if it holds the release that is installed anyway."""
    if not folder:
        return "", ""
    found = [d.version for d in importlib.metadata.distributions(name="bitsandbytes", path=[folder])]
    if not found:
        sys.exit(f"--newest {folder}: there is no bitsandbytes in it")
    return ("", "") if found[0] == importlib.metadata.version("bitsandbytes") else (folder, found[0])


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _host(device: str, threads: int) -> dict[str, Any]:
    name = processor()
    if device != "cpu":
        import torch

        name = torch.cuda.get_device_name()
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return {"device": name, "threads": threads, "cores": _cores(), "load": load, "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
