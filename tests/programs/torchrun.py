"""torchrun on two processes of this machine, over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processor import ROOT

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def torchrun(site: Path) -> Callable[..., list[dict]]:
    """Run a worker of this folder on two ranks; what each wrote to ``OUT/<rank>.json``, in order."""

    def run(worker: str, out: Path, *arguments: str, timeout: float = 240, **environ: str) -> list[dict]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(site)]), "PATCHES_AUTOLOAD": "1",
               "OMP_NUM_THREADS": "1", **environ}  # fmt: skip
        if sys.platform == "linux":
            env["GLOO_SOCKET_IFNAME"] = "lo"  # a host name need not resolve
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run([*command, str(HERE / worker), str(out), *arguments],
                              capture_output=True, text=True, env=env, timeout=timeout)  # fmt: skip
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]

    return run
