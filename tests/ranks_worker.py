"""Worker of test_ranks.py, one process a rank: ``ranks.py OUT``.

Imports bitsandbytes, whose entry point applies the patches, compares the ranks and writes
``OUT/<rank>.json``: ``report`` or ``error``. Rank 1 finds ``RANK1_FOLDER`` before all else on its path, as
a machine of its own would.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

rank = os.environ["RANK"]
if rank == "1" and (folder := os.environ.pop("RANK1_FOLDER", "")):
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ["PYTHONPATH"]])
    os.execv(sys.executable, [sys.executable, *sys.argv])

import bitsandbytes
import torch.distributed as dist

import patches

answer: dict[str, object] = {"bitsandbytes": bitsandbytes.__version__, "WORLD_SIZE": os.environ["WORLD_SIZE"]}
try:
    patches.check_ranks()
except RuntimeError as error:
    answer["before init"] = str(error)
dist.init_process_group("gloo")
try:
    answer["report"] = {r.id: str(r.status) for r in patches.check_ranks()}
except patches.RanksDiffer as error:
    answer["error"] = str(error)
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(answer))
dist.barrier()
dist.destroy_process_group()
