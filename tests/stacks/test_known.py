"""The stacks that the package knows of: the table, which is nearest to the installed one, and one that is too old."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from patches import tested_stacks
from patches.engine import gate
from tools import stacks as tool

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch):
    def install(**versions: str) -> None:
        monkeypatch.setattr(gate, "installed_version", lambda package, *_: versions.get(package))

    return install


def test_the_package_knows_what_was_run():
    assert json.loads(tool.SHIPPED.read_text("utf-8")) == json.loads(tool.shipped()), "python -m tools.stacks writes it"
    assert set(tested_stacks.known_stacks()) <= set(tool.declared())


@pytest.mark.parametrize("name", tested_stacks.known_stacks())
def test_each_stack_is_nearest_to_itself(installed, name):
    stack = {package: releases[-1] for package, releases in tested_stacks.known_stacks()[name].items()}
    installed(**{**stack, "torch": f"{stack['torch']}+cpu"})
    found = tested_stacks.nearest_stack()
    assert found is not None and not found.others
    assert tested_stacks.known_stacks()[found.name] == tested_stacks.known_stacks()[name], (
        "the same but for its Python, or itself"
    )
    assert tested_stacks.report_notes() == (
        f"these releases were tested together (stack {found.name!r} in docs/releases.md)",
    )


def test_what_was_not_tried_is_named(installed):
    installed(torch="2.6.0", transformers="4.53.3", peft="0.17.0", accelerate="1.8.1", bitsandbytes="0.46.1")
    (said,) = tested_stacks.report_notes()
    assert said == "the nearest tested stack is transformers 4.53; not tested with it: peft 0.17.0 (tested: 0.16.0)"


def test_without_torch_or_with_odd_versions_it_says_nothing(installed):
    installed(transformers="4.53.3")
    assert tested_stacks.report_notes() == ()
    installed(torch="a build of ours")
    assert tested_stacks.report_notes() == ()


@pytest.mark.parametrize("package", tested_stacks.oldest_releases())
def test_what_is_too_old_is_named_with_what_is_needed(installed, package):
    oldest = dict(tested_stacks.oldest_releases())
    installed(**oldest)
    assert gate.too_old(oldest) == ""
    installed(**{**oldest, package: "0.1"})
    assert tested_stacks.report_notes() == (
        f"{package} 0.1 is too old: {oldest[package]} or later is needed; nothing is changed",
    )


@pytest.mark.release("the test above: what is too old is found and named")
def test_nothing_is_changed_beside_a_stack_that_is_too_old():
    pytest.importorskip("bitsandbytes")
    program = """
import logging, sys
logging.basicConfig(format="%(levelname)s %(message)s")
import bnb_patches
bnb_patches.REGISTRY.limits = bnb_patches.REGISTRY.limits._replace(oldest_supported={"torch": "99.0"})  # as if this torch were older than any that was run
import bitsandbytes
try:
    import transformers, peft
except ImportError:
    pass
bnb_patches.apply()
report = bnb_patches.report()
print({str(result.status) for result in report} - {"not installed"}, repr(report.diff()))
"""
    path = os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "PATCHES_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout == "{'not affected'} ''\n", done.stdout + done.stderr
    assert done.stderr.count("is too old: 99.0 or later is needed; nothing is changed") == 1, done.stderr


def test_the_bounds_of_the_extras_are_the_oldest_of_the_table():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]["demo"]
    bounds = dict(found.groups() for line in extras if (found := re.fullmatch(r"(\S+?)>=(\S+)", line)))
    assert {name: Version(bounds[name]) for name in tested_stacks.oldest_releases()} == {
        name: Version(release) for name, release in tested_stacks.oldest_releases().items()
    }
