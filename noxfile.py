"""How the suite meets several releases of bitsandbytes, and the newest of everything.

The sessions ``tests``, ``check``, ``older`` and ``tests_all`` use the Python that runs nox (``make test`` runs it from
``.venv``): the stack is installed once, and each older release of bitsandbytes lies alone in ``.bnb/<release>``, which
comes first on the path. ``newest`` builds an environment of its own.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import nox

from tests import forks, suites
from tests.from_pretrained import releases as older_transformers
from tests.releases import SHORT, files
from tools import stacks

ROOT = Path(__file__).parent
RELEASES = ("0.46.1", "0.47.0", "0.48.0", "0.48.1", "0.48.2", "0.49.0", "0.49.2", "0.50.0", "0.50.2")
"""Every release that the patches were run on."""
NEARLY_THE_NEXT = ("0.48.0", "0.48.1", "0.50.0")
"""Those that differ from 0.48.2 in one method, and from 0.50.2 in kernels for GPUs alone: `make test-all` runs what that can
change, as `make check` of older releases."""
ANYWHERE = (
    "architectures", "from_pretrained/test_releases.py", "engine", "image_models", "test_inductor_options.py", "verification",
    "harm/test_rule.py", "repairs/torchao", "test_benchmarks.py", "test_command_line.py", "test_command_line_input.py", "test_docs.py",
    "test_docs_symptoms.py",
    "newer_releases", "newest", "test_replay_tool.py", "test_found_without_code.py", "test_gpu_tools.py", "test_layout.py", "test_maintaining.py",
    "test_imports_one_way.py", "test_new_patch.py", "test_readme.py", "test_report_anywhere.py", "test_shim.py",
    "test_mutants_tool.py", "test_stability.py", "test_test_names.py", "test_typing.py", "test_upstream_tool.py", "test_without_posix.py",
)  # fmt: skip
"""Tests that bitsandbytes has no part in: run with the last release only."""
ONCE = ("harm/test_aot_cache.py",)
"""Slow, and about torch: run with one release, which has less to do otherwise."""
OLDER = ("oldest", "transformers 4.57")
"""The stacks of the table that `make check` meets; `make stacks` meets all, each with its own torch."""
OF_A_STACK = tuple(f"tests/{name}.py" for name in (
    "stacks/slice_defects", "stacks/slice_harm", "programs/test_stack", "test_sources"
))  # fmt: skip
"""The tests that an older stack runs, with the torch that is installed here."""
SLOWEST = ("--durations", "30", "--durations-min", "4")
PYTHONS = ("3.10", "3.12", "3.13")
"""Every supported Python but the one that the suite runs on."""
WITHOUT_TORCH = (
    "tests/engine", "tests/newest", "tests/test_shim.py", "tests/test_command_line.py",
    "tests/verification/test_verify.py", "tests/verification/test_processes.py", "tests/test_maintaining.py",
    "tests/test_without_posix.py",
)  # fmt: skip
PYODIDE = "314.0.7"
"""CPython 3.14 for node, of the npm registry: Linux distributions of today have none."""
NEEDS_SYSTEM = (
    "--ignore=tests/engine/test_threads.py",
    "--ignore=tests/engine/test_kept_code_elsewhere.py",
    "--deselect=tests/engine/test_registry.py::test_many_threads_at_once",
    "--deselect=tests/engine/test_transaction.py::test_an_error_in_the_midst_of_the_writes",
)  # fmt: skip
"""Tests of the engine that start threads or processes."""
STACK = ("bitsandbytes", "transformers", "peft", "accelerate", "torchao", "diffusers")

nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = True


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check the rules of style and the types that pyproject.toml states."""
    session.run(sys.executable, "-m", "ruff", "check", "--no-cache", external=True)
    session.run(sys.executable, "-m", "ruff", "format", "--check", "--no-cache", external=True)
    session.run(sys.executable, "-m", "mypy", "patches", "bnb_patches", "bnb_patches_autoload.py", external=True)
    session.run(str(Path(sys.executable).parent / "lint-imports"), "--no-cache", external=True)


@nox.session(venv_backend="none")
def ready(session: nox.Session) -> None:
    """Check style and types, while the packages that the tests need are downloaded."""
    with ThreadPoolExecutor(1) as pool:
        downloading = pool.submit(download, session)
        lint(session)
        downloading.result()


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Test with the bitsandbytes of ``.venv`` what :mod:`tests.suites` chooses. Arguments after ``--`` go to pytest."""
    files = [f"tests/{name}" for name in suites.OF_TEST]
    run_suite(session, ROOT, ["-m", suites.MARKS["test"], "--at-least", str(suites.AT_LEAST["test"]), *files])


@nox.session(venv_backend="none")
def check(session: nox.Session) -> None:
    """Test the rest of the newest release, but for what is left to `tests_all`. Arguments after ``--`` go to pytest."""
    download(session)
    chosen = ["-m", suites.MARKS["check"], "--at-least", str(suites.AT_LEAST["check"]), "tests"]
    run_suite(session, bitsandbytes(session, SHORT[-1]), chosen)


@nox.session(venv_backend="none")
def older(session: nox.Session) -> None:
    """Test the parts that an older release or stack can change, two at a time; ``-- 0.46.1 oldest`` takes these alone.

    Each runs in one process. With two workers each, both would import the stack and collect the tests.
    """
    two_at_a_time(lambda release: bitsandbytes(session, release), SHORT)  # their sources say which release runs what
    there = (*SHORT[-2::-1], *OLDER)
    if unknown := set(session.posargs) - set(there):
        session.error(f"{', '.join(sorted(unknown))}: there are {', '.join(there)}")

    downloading = threading.Lock()  # the stacks share folders
    beside = preloaded()

    def run(name: str) -> subprocess.CompletedProcess[str]:
        if name in SHORT:
            env = {**environment(ROOT / ".bnb" / name, ROOT), **beside}
            return pytest_beside(env, "-m", suites.MARKS["both"], *files(name))
        with downloading:
            folders = stacks.folders(name, stacks.declared()[name])
        return pytest_beside(environment(*folders, ROOT), *OF_A_STACK)

    failed = []
    with ThreadPoolExecutor(2) as pool:
        running = {pool.submit(run, name): name for name in session.posargs or there}
        for each in as_completed(running):
            name, done = running[each], each.result()
            print(f"{name}:\n{done.stdout}{done.stderr}", flush=True)
            if done.returncode:
                failed.append(name)
    if failed:
        session.error(f"failed with {', '.join(failed)}")


@nox.session(venv_backend="none")
@nox.parametrize("bnb", RELEASES, ids=RELEASES)
def tests_all(session: nox.Session, bnb: str) -> None:
    """All of the suite, on every release of bitsandbytes that a patch was written for: before a release."""
    if bnb in NEARLY_THE_NEXT:
        two_at_a_time(lambda release: bitsandbytes(session, release), (bnb, *SHORT))
        run_suite(session, bitsandbytes(session, bnb), files(bnb))
        return
    without = () if bnb == SHORT[-1] else ANYWHERE
    for release in older_transformers.RELEASES if bnb == SHORT[-1] else ():
        release.install()
    left = (*without, *(ONCE if bnb != SHORT[1] else ()))
    run_suite(session, bitsandbytes(session, bnb), [f"--ignore=tests/{name}" for name in left])


@nox.session(venv_backend="none")
def oldest(session: nox.Session) -> None:
    """Test the main path and every reproducer on the oldest transformers, peft and accelerate."""
    folders = stacks.folders("oldest", stacks.declared()["oldest"])
    for release in (SHORT[0], SHORT[-1]):
        env = environment(bitsandbytes(session, release), *folders, ROOT)
        session.run(sys.executable, "-m", "pytest", "-q", "tests/programs/test_stack.py", env=env, external=True)
        session.run(sys.executable, "-m", "patches", "verify", env=env, external=True)


@nox.session(python=PYTHONS)
def pythons(session: nox.Session) -> None:
    """Test the engine on other Pythons without torch, and make every rewrite from the files of the stack."""
    session.install("--constraint", "constraints.txt", "packaging", "pytest", "pytest-timeout", "wrapt")
    session.install("--constraint", "constraints.txt", "--no-deps", *STACK)
    pytest = ("python", "-m", "pytest", "-q")
    session.run(*pytest, *WITHOUT_TORCH, env=environment(ROOT))
    for release in RELEASES:
        session.run(*pytest, "tests/test_sources.py", env=environment(bitsandbytes(session, release), ROOT))


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Build the site in ``build/docs/html``, every warning an error. The Python that runs nox shows the diffs of patches."""
    session.install("--no-compile", "--requirement", "docs/requirements.txt")
    session.run("python", "-m", "tools.docs", sys.executable, env=environment(ROOT))
    sphinx = ("python", "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--fresh-env")
    session.run(*sphinx, "docs", "build/docs/html", env=environment(ROOT))


@nox.session(venv_backend="none")
def figures(session: nox.Session) -> None:
    """Measure for the site each reproducer that has changed, on the newest release that has its defect."""
    for release in reversed(RELEASES):
        env = environment(bitsandbytes(session, release), ROOT)
        session.run(sys.executable, "-m", "tools.docs.figures", env=env, external=True)


@nox.session(venv_backend="none")
def wasm(session: nox.Session) -> None:
    """Test the same on Python 3.14, and where there is no process, no thread and no fork: pyodide, in node."""
    pyodide, site = session.cache_dir / f"pyodide-{PYODIDE}", session.cache_dir / "wasm-site"
    if not (pyodide / "package" / "pyodide.mjs").exists():
        pyodide.mkdir(parents=True, exist_ok=True)
        session.run("npm", "pack", "--silent", f"pyodide@{PYODIDE}", "--pack-destination", str(pyodide), external=True)
        with tarfile.open(next(pyodide.glob("*.tgz"))) as archive:
            archive.extractall(pyodide)
    if not (site / "pytest").is_dir():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt")
        pip += ("--target", str(site))
        session.run(*pip, "packaging", "pytest", external=True)
        session.run(*pip, "--no-deps", *STACK, external=True)
    node = ("node", "tools/wasm.mjs", str(pyodide), str(site))
    last = bitsandbytes(session, RELEASES[-1])
    session.run(*node, str(last), "tests/engine", *NEEDS_SYSTEM, external=True)
    for release in RELEASES:
        session.run(*node, str(bitsandbytes(session, release)), "tests/test_sources.py", external=True)


@nox.session
def newest(session: nox.Session) -> None:
    """Try the newest release of each package, and say which patch no longer fits. Not run in CI.

    Arguments after ``--`` are requirements that hold one back: ``nox -s newest -- torch==2.13.0``, where its newest
    build would be gigabytes; ``--dry-run`` changes no file.
    """
    options = [each for each in session.posargs if each.startswith("-")]
    session.install("--upgrade", "torch", *STACK, *(each for each in session.posargs if each not in options))
    session.install("--editable", ".")
    session.run("python", "-m", "tools.newest", *options, env=environment(ROOT))


def run_suite(session: nox.Session, first: Path, chosen: list[str]) -> None:
    """Run pytest with the folder ``first`` at the head of the path, over what is ``chosen``."""
    # A file is run whole by one worker, for its tests share what they launch; tests/conftest.py has the order.
    whole = ["-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *SLOWEST, *chosen]
    env = {**environment(*dict.fromkeys((first, ROOT))), **preloaded()}
    session.run(sys.executable, "-m", "pytest", *(session.posargs or whole), env=env, external=True)


def pytest_beside(env: dict[str, str], *chosen: str) -> subprocess.CompletedProcess[str]:
    """Run pytest over what is ``chosen``, and keep what it says; in a fork of the server where ``env`` names it."""
    arguments = ("-q", *SLOWEST, *chosen)
    if connection := forks.shared(env):
        (done,) = connection.run(forks.pytest_program(*arguments, **env), timeout=3600)
        return done
    command = (sys.executable, "-m", "pytest", *arguments)
    return subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, text=True, capture_output=True)


def preloaded() -> dict[str, str]:
    """Return the variable by which tests find a server that has imported the packages around bitsandbytes."""
    return {forks.VARIABLE: server().address} if sys.platform == "linux" else {}


@functools.cache
def server() -> forks.Server:
    """Start a server for all sessions, which ends with nox."""
    return forks.Server({**os.environ, **environment(ROOT)})


def environment(*folders: Path) -> dict[str, str]:
    """Variables for a run with ``folders`` first on the path."""
    # One thread per process: two workers on two cores, and sums that do not depend on the machine.
    path = os.pathsep.join(map(str, folders))
    return {"PYTHONPATH": path, "PATCHES_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def two_at_a_time(do: Callable[[Any], object], what: Iterable[Any]) -> None:
    """Call ``do`` for each of ``what``: to download and unpack takes one core each."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(do, what))


def download(session: nox.Session) -> None:
    """Install the older releases that the tests of the newest one read."""
    two_at_a_time(lambda release: bitsandbytes(session, release), SHORT)
    older_transformers.DAILY.install()


def bitsandbytes(session: nox.Session, release: str) -> Path:
    """Return the folder that holds bitsandbytes ``release`` alone, and download it the first time."""
    folder = ROOT / ".bnb" / release
    if not (folder / f"bitsandbytes-{release}.dist-info").is_dir():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--upgrade")
        session.run(*pip, "--target", str(folder), f"bitsandbytes=={release}", external=True)
    return folder
