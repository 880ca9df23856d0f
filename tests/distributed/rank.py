"""One rank of a launch: ``rank.py FOLDER``, in which ``cells.json`` says what to run; writes ``FOLDER/<rank>.json``.

Whether this rank has the plugin is said by ``PATCHES_AUTOLOAD``, as in a user's program.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

logging.disable(logging.WARNING)
BEGAN = time.process_time()

import bitsandbytes  # noqa: E402, F401, with this import the entry point runs
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.checkpoint import CheckpointException  # noqa: E402

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WAIT = timedelta(seconds=int(os.environ.get("WAIT", "60")))

OTHER = 6
"""Seed of the other base weights, whose quantization states have packed entries of another length."""


def run(name: str, folder: Path) -> tuple[str, str]:
    from tests.distributed import checkpoints, misfits, training

    kind, *rest = name.split("/")
    sharded = int(os.environ.get("SHARDS", str(WORLD)))
    if kind == "train":
        return training.cell(*rest)
    if kind == "embedding":
        return training.embedding(*rest)
    if kind == "save":
        sign = "+" if os.environ.get("PATCHES_AUTOLOAD", "1") != "0" else "-"
        return checkpoints.save(folder / f"{rest[0]}-{rest[1]}-{sharded}{sign}", sharded, *rest)
    if kind == "load":
        quantized, optimizer, writer, way, base = rest
        at = folder / f"{quantized}-{optimizer}-{writer}"
        return checkpoints.load(at, sharded, quantized, optimizer, way, 0 if base == "same" else OTHER)
    if kind == "adapters":
        return checkpoints.adapter(folder / name.replace("/", "-"), *rest)
    return misfits.cell(folder, *rest)


def join(files: dist.Store, number: int, tries: int = 3) -> None:
    """Make the process group of cell ``number``; a port may still be in use by a rank that an earlier cell lost."""
    for left in reversed(range(tries)):
        try:
            store = dist.PrefixStore(f"{number}.{left}/", files)
            dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=WAIT)
            return
        except RuntimeError:
            if not left:
                raise


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    files = dist.FileStore(str(folder / "store"), WORLD)
    answers = {}
    for number, name in enumerate(json.loads((folder / "cells.json").read_text())):
        join(files, number)
        try:
            answers[name] = run(name, folder.parent)
        except (Exception, CheckpointException) as error:  # which is no Exception
            lines = [line.strip() for line in str(error).splitlines() if not line.startswith(("Traceback", "  "))]
            answers[name] = "error", f"{type(error).__name__}: {' '.join(lines)}"
            del error
        torch._dynamo.reset()
        if answers[name][0] == "error":
            gc.collect()
        dist.destroy_process_group()
        if answers[name][0] == "error":
            gc.collect()
        if name.endswith("killed"):
            break  # nobody to wait for
        files.set(f"done/{number}/{RANK}", "")
        files.wait([f"done/{number}/{rank}" for rank in range(WORLD)], 2 * WAIT)
        if number % 50 == 49:
            gc.collect()
    print(f"{time.process_time() - BEGAN:.1f} CPU seconds", file=sys.stderr)
    (folder / f"{RANK}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
