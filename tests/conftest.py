"""What the tests share: the device, fresh processes, and a process that begins unpatched."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from zlib import crc32

import pytest

from tests import device as simulated
from tests import compiling, forks, processor, suites

os.environ["PATCHES_AUTOLOAD"] = "0"  # a test says itself what is applied
os.environ["PYTHONPATH"] = processor.path_for_children()
processor.pretend(os.environ.setdefault(processor.VARIABLE, "plain"))

if simulated.kind():
    simulated.pretend(simulated.kind())
_ENVIRON = dict(os.environ)  # what libraries set later, Inductor among them, is not for other processes

import patches  # noqa: E402

compiling.without_figures()
gc.set_threshold(10_000, 10, 10)  # a twenty-fifth of the time of a worker went into looking for cycles

# As in the background of a script: every process that a test starts would inherit it, and not be stopped by Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _devices() -> list[str]:
    if simulated.kind():
        return [simulated.kind()]
    try:
        import torch
    except ImportError:
        return ["cpu"]
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--at-least", type=int, default=0, metavar="N", help="fail unless so many tests have passed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first: workers that take whole files then end together."""
    _leave_parameters_to_a_release(items)
    for item in items:
        if not suites.is_in_test(item.path):
            item.add_marker(pytest.mark.check("not a file of `make test`"))
    first = ("tests/programs/", "tests/device/", "tests/harm/", "tests/test_")
    items.sort(key=lambda item: next((at for at, start in enumerate(first) if item.nodeid.startswith(start)), 9))


def _leave_parameters_to_a_release(items: list[pytest.Item]) -> None:
    """Of each test that is marked ``one_in(n)`` so many stay, chosen by their names: each second one may be all alike."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in") and hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in tests.values():
        (n,) = found[0].get_closest_marker("one_in").args
        found.sort(key=lambda item: crc32(item.nodeid.encode()))
        for item in found[-(-len(found) // n) :]:
            item.add_marker(pytest.mark.release(f"one in {n} of its parameters"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that passes few tests has lost the others: a wrong path, a mark, an import that skips a whole file."""
    passed, wanted = _passed(session.config), session.config.getoption("at_least")
    if exitstatus == pytest.ExitCode.OK and passed < wanted and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    passed, wanted = _passed(config), config.getoption("at_least")
    if passed < wanted:
        terminalreporter.write_line(
            f"FAILED: {passed} tests passed, and at least {wanted} should (tests/suites.py): the others were not run",
            red=True,
        )


def _passed(config: pytest.Config) -> int:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return len(reporter.stats.get("passed", ())) if reporter else 0


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> str:
    """Each device that quantized layers run on here: "cpu", and "cuda" where there is one; or the simulated one."""
    return request.param


@pytest.fixture(autouse=True, scope="module")
def little_to_walk() -> None:
    """The engine walks over all that is alive: what earlier tests and imports have left is kept out of that.

    It is never thawed. Garbage was collected before, and what is alive now mostly stays until the end.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def cheap_compiling() -> None:
    compiling.without_figures()  # again, for torch is imported by then


_clean: object = None
"""The state of the registry in which nothing was found to be applied."""


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Every test begins unpatched and leaves the process as it found it."""
    global _clean
    registry = patches.REGISTRY._store
    if registry.read() is not _clean:  # a report takes longer than most tests
        assert not patches.report().with_status(patches.Status.APPLIED, patches.Status.SHADOWED)
        _clean = registry.read()
    yield
    if registry.read() is not _clean and not patches.revert().with_status(
        patches.Status.APPLIED, patches.Status.SHADOWED
    ):
        _clean = registry.read()


def _succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, _said(done)
    return done.stdout


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"


@pytest.fixture(scope="session")
def fresh() -> Callable[..., str]:
    """Run Python source in a fresh process and return what it printed; its failure fails the test."""

    def run(source: str, *arguments: str, timeout: float = 600, cwd: Path | None = None, **environ: str) -> str:
        env = {**_ENVIRON, **environ}
        command = [sys.executable, "-c", textwrap.dedent(source), *arguments]
        return _succeeded(subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=timeout))

    return run


@pytest.fixture(scope="session")
def forked() -> Callable[..., str]:
    """As ``fresh``, for a program that torch and transformers may be imported in before it begins (:mod:`.forks`)."""

    def run(source: str, *arguments: str, timeout: float = 600, cwd: Path | None = None, **environ: str) -> str:
        program = forks.Program(
            ["-c", textwrap.dedent(source), *arguments], {**_ENVIRON, **environ}, str(cwd or Path.cwd())
        )
        (done,) = forks.run(program, timeout=timeout)
        return _succeeded(done)

    return run


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ``PYTHONPATH`` that installs our entry point, wherever this checkout is not installed."""
    folder = tmp_path_factory.mktemp("site")
    if entry_points(group="torch.backends", name="bnb_patches"):
        return folder
    info = folder / "bnb_patches-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bnb-patches\nVersion: 0.0.0\n")
    points = {"bitsandbytes": "start", "torch": "wait"}
    text = "".join(f"[{name}.backends]\nbnb_patches = bnb_patches_autoload:{call}\n" for name, call in points.items())
    (info / "entry_points.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def repaired(site: Path) -> dict[str, str]:
    """The environment of a program that the entry points repair."""
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(site)])
    env = {**_ENVIRON, "PYTHONPATH": path, "PATCHES_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"  # a host name need not resolve
    return env


@pytest.fixture(scope="session")
def torchrun(repaired: dict[str, str]) -> Callable[..., list[dict]]:
    """Run a worker under torchrun on two ranks, over gloo; what each wrote to ``OUT/<rank>.json``, in order."""

    def run(worker: Path, out: Path, *arguments: str, timeout: float = 240, **environ: str) -> list[dict]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(worker), str(out), *arguments]
        env = {**repaired, **environ}
        _succeeded(subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout))
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]

    return run


@pytest.fixture(scope="session")
def two_ranks(repaired: dict[str, str]) -> Callable[..., list[dict]]:
    """As ``torchrun``, in forks that begin with torch imported, each with the variables that torchrun sets."""

    def run(
        worker: Path, out: Path, *arguments: str, ranks: int = 2, timeout: float = 240, **environ: str
    ) -> list[dict]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks),
                     "LOCAL_WORLD_SIZE": str(ranks)}  # fmt: skip
        programs = [
            forks.Program([str(worker), str(out), *arguments],
                          {**repaired, **world, **environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]  # fmt: skip
        ends = forks.run(*programs, timeout=timeout)
        failed = [rank for rank, done in enumerate(ends) if done.returncode not in (0, forks.TIMED_OUT)]
        first = sorted(failed, key=lambda rank: ends[rank].returncode < 0)  # the others were stopped for it
        for rank in first or range(ranks):
            other = ends[rank - 1].stderr[-2500:]
            assert not ends[rank].returncode, f"rank {rank}\n{_said(ends[rank])}\nthe other rank\n{other}"
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]

    return run
