"""Starting ranks, and what they say together."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests import forks

VARIABLE = "PATCHES_TEST_TIMES"
"""Set to print how long each rank took."""
RANK = Path(__file__).with_name("rank.py")


def launch(
    folder: Path,
    cells: Sequence[str],
    environ: dict[str, str],
    world: int,
    plugin: Sequence[bool] | bool,
    timeout: float = 900,
) -> dict[str, list[tuple[str, str]]]:
    """Run ``cells`` on ``world`` ranks (0: one, which does not shard); for each cell, what each rank said."""
    ranks = max(world, 1)
    patched = [plugin] * ranks if isinstance(plugin, bool) else plugin
    here = Path(tempfile.mkdtemp(prefix=f"ranks{world}-", dir=folder))
    (here / "cells.json").write_text(json.dumps(list(cells)))
    env = {**environ, "WORLD_SIZE": str(ranks), "SHARDS": str(world), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    programs = [
        forks.Program(
            [str(RANK), str(here)], {**env, "RANK": str(rank), "PATCHES_AUTOLOAD": str(int(patched[rank]))}, os.getcwd()
        )
        for rank in range(ranks)
    ]
    done = forks.run(*programs, timeout=timeout)
    told = [json.loads(said.read_text()) if (said := here / f"{rank}.json").exists() else None for rank in range(ranks)]
    if VARIABLE in os.environ:
        print(f"{ranks} ranks, {len(cells)} cells:", [process.stderr.splitlines()[-1:] for process in done])
    if None in told and not cells[-1].endswith("killed"):
        words = [f"rank {rank}: {process.returncode}\n{process.stderr[-3000:]}" for rank, process in enumerate(done)]
        raise RuntimeError("\n".join(words))
    return {cell: [tuple(rank[cell]) for rank in told if rank] for cell in cells}


def together(said: Sequence[tuple[str, str]]) -> str:
    """``right``, ``wrong``, ``error`` (on every rank), ``none`` (nothing to judge), or ``apart``: ranks differ."""
    kinds = {kind for kind, _ in said}
    if any("peer" in words or "Timed out" in words for kind, words in said if kind == "error"):
        return "apart"  # a rank was left waiting
    return kinds.pop() if len(kinds) == 1 else "wrong" if kinds == {"right", "wrong"} else "apart"
