"""``make upstream TESTS=<folder>``: bitsandbytes' or peft's own CPU tests, unpatched and patched, outcome by outcome.

``TESTS`` is the folder ``tests`` of a checkout at the release that is installed; nothing of it is kept here. A test that
is worse with the plugin is a fault of ours, unless it asserts the very defect: those are named below. A test that passes
only with the plugin is printed as well.

peft's tests need ``datasets``, ``diffusers``, ``parameterized``, ``scipy``, ``Pillow`` and ``scikit-learn``. What they
load from the Hub is built here, tiny (``tools/upstream_models.py``). Further arguments go to pytest: ``-k bnb``,
``--ignore=FILE``, files of the checkout (``tests/test_mixed.py``). ``--every 40`` runs each 40th test.

A test that fails in both runs says nothing of the plugin: what most of them raise is printed. peft 0.20 needs torchao
before 0.18.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
EXPECTED = {"test_linear_kbit_fp32_bias": "asserts a bias in float32 that was truncated to the input's dtype"}
"""Tests that pass only with a defect that is repaired, and what they assert."""


class Project(NamedTuple):
    """Whose tests they are, and how they run without a GPU and without a network."""

    name: str
    mark: str
    """A file of the folder that no other project's folder has."""
    files: tuple[str, ...] = ()
    """What is run unless the arguments name files; all, if there are none."""
    options: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    package: bool = False
    """Whether its tests import each other as the package ``tests``; ours has that name, too."""


PROJECTS = (
    Project(
        "peft",
        "testing_common.py",
        (
            "test_quantization.py", "test_custom_models.py", "test_low_level_api.py", "test_mixed.py", "test_decoder_models.py",
            "test_initialization.py", "test_tuners_utils.py", "test_trainable_tokens.py", "test_target_parameters.py",
            "test_other.py", "test_lora_variants.py", "test_adaption_prompt.py", "test_cpt.py", "test_vera.py",
        ),
        # Their coverage, and warnings as errors, which releases of other packages that came later break.
        ("-o", "addopts=", "-o", "filterwarnings=", "-p", "tools.upstream_offline"),
        (("HF_HUB_OFFLINE", "1"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1"), ("TOKENIZERS_PARALLELISM", "false")),
        package=True,
    ),
    Project("bitsandbytes", "conftest.py", environ=(("BNB_TEST_DEVICE", "cpu"),)),
)  # fmt: skip
"""The first whose mark is in the folder."""


def project_of(tests: Path) -> Project | None:
    return next((project for project in PROJECTS if (tests / project.mark).exists()), None)


def outcomes(tests: Path, patched: bool, arguments: Sequence[str], cache: Path | None = None) -> dict[str, str]:
    """Every test that ran, and what came of it: ``passed``, ``skipped`` or the first line of what it raised.

    ``cache`` holds models in the place of those of the Hub.
    """
    project = project_of(tests) or PROJECTS[-1]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "outcomes.xml"
        given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        first = [str(tests.parent)] if project.package else []
        path = os.pathsep.join([*first, *(os.path.abspath(folder) for folder in given), str(ROOT)])
        environ = {**os.environ, **dict(project.environ), "PATCHES_AUTOLOAD": str(int(patched)),
                   "OMP_NUM_THREADS": "1", "PYTHONPATH": path}  # fmt: skip
        if cache is not None:
            environ["HF_HUB_CACHE"] = str(cache)
        named = any(argument.endswith(".py") or ".py::" in argument for argument in arguments if argument[:1] != "-")
        chosen = [] if named else [f"{tests.name}/{name}" for name in project.files if (tests / name).exists()]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--junitxml", str(log)]
        command += [
            "-p",
            "tools.upstream_every",
            *project.options,
            *arguments,
            *([] if named else chosen or [tests.name]),
        ]
        done = subprocess.run(command, cwd=tests.parent, env=environ,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
        if not log.exists() or done.returncode > 1:
            sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}")
        return {
            f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in ET.parse(log).iter("testcase")
        }


def _outcome(case: ET.Element) -> str:
    for child in case:
        if child.tag in ("failure", "error"):
            return f"{child.tag}: {(child.get('message') or '').partition(chr(10))[0]}"
        if child.tag == "skipped":
            return "skipped"
    return "passed"


def _failed(outcome: str) -> bool:
    return outcome.startswith(("failure", "error"))


def differences(unpatched: dict[str, str], patched: dict[str, str]) -> list[tuple[str, str, str]]:
    """Name, outcome without the plugin, outcome with it, of each test that differs in more than its message."""

    def kind(outcome: str) -> str:
        return outcome.partition(":")[0]

    names = dict.fromkeys((*unpatched, *patched))
    rows = ((name, unpatched.get(name, "did not run"), patched.get(name, "did not run")) for name in names)
    return [row for row in rows if kind(row[1]) != kind(row[2])]


def report(results: Sequence[dict[str, str]]) -> int:
    """Print the counts and what differs; how many tests are worse with the plugin, and not for a named reason."""
    for label, found in zip(("unpatched", "patched"), results):
        counts = Counter(outcome.partition(":")[0] for outcome in found.values())
        print(f"{label:<10} " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    unpatched, patched = results
    both = (outcome for name, outcome in unpatched.items() if _failed(outcome) and _failed(patched.get(name, "")))
    for outcome, count in Counter(both).most_common(3):
        print(f"{count} in both runs: {outcome}")
    bad = 0
    for name, before, after in differences(*results):
        known = next((why for test, why in EXPECTED.items() if f"::{test}" in name), "")
        better = _failed(before) and after == "passed"
        bad += not known and not better
        print(
            f"{name}\n    unpatched  {before}\n    patched    {after}"
            + ("\n    better" if better else f"\n    expected: it {known}" if known else "")
        )
    return bad


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make upstream", description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path, help="the folder `tests` of a checkout of bitsandbytes or peft")
    options, arguments = parser.parse_known_args(argv)
    project = project_of(options.tests)
    if project is None:
        print(f"{options.tests} is not the folder `tests` of a checkout of bitsandbytes or peft", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        cache = None
        if project.name == "peft":
            cache = Path(scratch)
            build = [sys.executable, "-m", "tools.upstream_models", scratch]
            subprocess.run(
                build, check=True, capture_output=True, cwd=ROOT, env={**os.environ, "PATCHES_AUTOLOAD": "0"}
            )
        results = [outcomes(options.tests.resolve(), patched, arguments, cache) for patched in (False, True)]
    return int(bool(report(results)))


if __name__ == "__main__":
    sys.exit(main())
