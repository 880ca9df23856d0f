"""Running test files on a processor that is not this process': bitsandbytes asks for it once, at import."""

from __future__ import annotations

import subprocess
from pathlib import Path

import bitsandbytes
import pytest
from packaging.version import Version

from tests import forks, processor, releases

_BESIDE_THE_INSTRUCTION = [pytest.mark.release("the same on the host, which has the instruction")]
_ON_THE_NEWEST = [pytest.mark.release("the newest release; on an older one verify runs on this processor, too")]
PROCESSORS = pytest.mark.parametrize("kind", [
    pytest.param("emulated", marks=_BESIDE_THE_INSTRUCTION if processor.host_has_avx512bf16() else []),
    pytest.param("host", marks=[] if releases.is_newest() else _ON_THE_NEWEST),
])  # fmt: skip
"""``emulated`` stands in for the instruction, not for the library: see :mod:`tests.processor`."""


def run(config: pytest.Config, kind: str, *files: Path) -> None:
    """Run what ``config`` selects of the tests in ``files``, which are not collected by themselves, on the processor ``kind``."""
    if Version(bitsandbytes.__version__) < Version("0.49"):
        pytest.skip("before 0.49 bitsandbytes has no kernels for AVX512")
    if kind == "host" and not processor.host_has_avx512bf16():
        pytest.skip("this processor has no AVX512-BF16")
    if kind == "emulated" and processor.host_has_avx512bf16() and Version(bitsandbytes.__version__) < Version("0.50"):
        pytest.skip("this processor has AVX512-BF16: the emulation is run beside it on the newest series only")
    done = pytest_on(kind, "-q", "-x", "-m", config.getoption("markexpr"), *map(str, files))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def pytest_on(kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with ``arguments`` in a process of its own, on the processor ``kind``."""
    alone = ("-p", "no:cacheprovider", "-p", "no:xdist")
    (done,) = forks.run(forks.pytest_program(*alone, *arguments, **{processor.VARIABLE: kind}), timeout=1800)
    return done
