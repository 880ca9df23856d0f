"""`make newest` shows each definition that a newer release has changed, once, with the patches that rest on it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from patches import REGISTRY
from patches.engine import definitions
from tests.newer_releases.copies import NUMBERS, copy, replace
from tools.newest import changes

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "bitsandbytes"
IDS = [
    "bitsandbytes-int8-scales-lost-on-offload",
    "bitsandbytes-linear4bit-sharded-state-dict",
    "bitsandbytes-params4bit-chunk",
]
SHOW = """
import sys
from pathlib import Path
from patches import REGISTRY
from patches.process_registry import NEWER_RELEASES
from tools.newest import changes
tested = Path(sys.argv[1])
def text(package, release, module):
    file = tested.joinpath(*module.split(".")[1:])
    return file.with_suffix(".py").read_text("utf-8")
parts = [part for patch_id in sys.argv[2:] for part in REGISTRY.patches[patch_id].parts]
found, unknown = changes.changes(parts, NEWER_RELEASES.sources)
print(*(changes.describe(change, text) for change in found), *unknown, sep="\\n")
"""
"""What it prints of the source, with the installed release in the place of the wheel of the tested one."""


def installed() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def shown(folder: Path, *ids: str) -> str:
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "PATCHES_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", SHOW, str(installed()), *ids], env=env, cwd=folder, capture_output=True, text=True)  # fmt: skip
    assert not done.returncode, done.stderr
    return done.stdout


pytestmark = pytest.mark.skipif(
    version(PACKAGE) != REGISTRY.patches[IDS[0]].parts[0].tested_up_to, reason="another release has other functions"
)


@pytest.fixture(scope="module")
def with_a_changed_method(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("changed")
    begins = "    def _save_to_state_dict(self, destination, prefix, keep_vars):\n"
    text = (installed() / "nn" / "modules.py").read_text("utf-8")
    at = text.index(begins, text.index("class Linear8bitLt("))
    changed = text[:at] + text[at:].replace(begins, f"{begins}        assert prefix\n", 1)
    copy(folder, PACKAGE, NUMBERS[PACKAGE], {"nn/modules.py": lambda _: changed})
    return shown(folder, *IDS)


def test_a_changed_method_is_shown_once_with_its_lines_and_all_patches_that_rest_on_it(with_a_changed_method):
    said = with_a_changed_method.splitlines()
    tested = f"{PACKAGE} {version(PACKAGE)}"
    assert f"bitsandbytes.nn.modules:Linear8bitLt._save_to_state_dict differs from {tested}" in said
    assert f"    --- {tested}" in said and f"    +++ {PACKAGE} {NUMBERS[PACKAGE]}" in said
    assert [line for line in said if line.startswith(("    +  ", "    -  "))] == ["    +    assert prefix"]
    assert [line for line in said if line.startswith("  patches: ")] == [f"  patches: {IDS[0]}, {IDS[1]}"]


def test_nothing_else_of_the_file_is_shown(with_a_changed_method):
    assert with_a_changed_method.count(" differs from ") == 1


def test_a_copy_that_differs_in_its_number_and_in_comments_shows_nothing(tmp_path):
    comment = replace("class Int8Params", "# A comment.\nclass Int8Params")
    copy(tmp_path, PACKAGE, NUMBERS[PACKAGE], {"nn/modules.py": comment})
    assert not shown(tmp_path, *IDS).strip()


CLASS = '''
@dataclass
class Config(Base):
    """Words."""

    field: int = 0
    other = 1

    # A comment.
    @property
    def method(self):
        """Words,

        and more."""
        return (
            self.field
        )
'''


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("Config", ["@dataclass", "class Config(Base):", "    field: int = 0"]),
        ("Config.method", ["@property", "def method(self):", "    return (", "        self.field", "    )"]),
        ("Config.other", ["other = 1"]),
        ("Config.absent", []),
    ],
)
def test_the_lines_of_a_definition_are_those_that_are_compared(name, lines):
    assert definitions.digests(CLASS, [name])[name] != definitions.ABSENT or not lines
    assert [line for line in changes.definition(CLASS, name) if line] == lines


def test_a_module_that_a_release_does_not_have_defines_nothing():
    assert changes.definition(None, "function") == []


def test_a_long_diff_says_how_much_of_it_is_left_out():
    lines = [str(number) for number in range(changes.LONGEST + 5)]
    assert changes.cut(lines) == [*lines[: changes.LONGEST], "... 5 more lines"]
    assert changes.cut(lines[: changes.LONGEST]) == lines[: changes.LONGEST]


BESIDE = """
from patches import REGISTRY
from tools.newest import changes
from tools.newest.__main__ import is_newer, raises
(part,) = REGISTRY.patches["peft-adapters-offloaded"].parts
found, unknown = changes.changes([part], changes.NEWER_RELEASES.sources)
print(is_newer(part), raises(part), *(change.name for change in found), *unknown)
"""


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_newer_package_beside_the_one_that_is_repaired_is_shown_and_raises_nothing(tmp_path):
    """The accelerate that a patch of peft edits: its `tested_up_to` is of peft, which is as it was."""
    change = {"hooks.py": replace("def attach_align_device_hook(\n", "def attach_align_device_hook(\n    *others,\n")}
    copy(tmp_path, "accelerate", NUMBERS["accelerate"], change)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "PATCHES_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", BESIDE], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "accelerate.hooks:attach_align_device_hook"], done.stderr
