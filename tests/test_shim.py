"""The entry point never breaks ``import bitsandbytes``, whatever ``patches`` means in the user's program."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
START = """
import logging, sys
logging.basicConfig(format="%(levelname)s %(message)s")
import bnb_patches_autoload
{call}
print(sorted(n for n in sys.modules if n.split(".")[0] in ("patches", "bnb_patches")))
"""


def start(
    folder: Path, before: str = "", root: Path = ROOT, call: str = "bnb_patches_autoload.start()"
) -> subprocess.CompletedProcess[str]:
    """Run the shim in a fresh process whose working directory, ``folder``, comes first on the path."""
    path = f"import sys; sys.path[:0] = [{str(folder)!r}]; sys.path.append({str(root)!r})"
    code = "\n".join([path, before, START.replace("{call}", call)])
    env = {**os.environ, "PATCHES_AUTOLOAD": "1"}
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    return result


def test_alone_it_imports_patches_and_says_nothing(tmp_path):
    result = start(tmp_path)
    assert "'patches.autoload'" in result.stdout
    assert result.stderr == ""


def test_switched_off_it_imports_nothing(tmp_path):
    off = "import os; os.environ['PATCHES_AUTOLOAD'] = ' Off '"
    result = start(tmp_path, before=off)
    assert result.stdout == "[]\n" and result.stderr == ""


def test_switched_off_it_still_gives_a_name_where_another_is_in_the_way(tmp_path):
    (tmp_path / "patches.py").write_text("mine = 1")
    off = "import os; os.environ['PATCHES_AUTOLOAD'] = '0'"
    result = start(tmp_path, before=off, call="bnb_patches_autoload.start(); import bnb_patches; bnb_patches.apply")
    assert "'bnb_patches.autoload'" in result.stdout and "hides the package" in result.stderr


@pytest.mark.parametrize("kind", ["file", "package"])
def test_a_module_of_the_users_is_neither_run_nor_in_the_way(tmp_path, kind):
    theirs = tmp_path / ("patches.py" if kind == "file" else "patches/__init__.py")
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("raise SystemExit('the user module ran')")
    result = start(tmp_path)
    assert "'bnb_patches.autoload'" in result.stdout and "'patches'" not in result.stdout
    assert f"WARNING {theirs.resolve()} hides the package 'patches'" in result.stderr


@pytest.mark.skipif(
    not entry_points(group="bitsandbytes.backends", name="bnb_patches"), reason="bnb-patches is not installed here"
)
def test_a_module_of_the_users_does_not_break_the_import_of_bitsandbytes(tmp_path):
    pytest.importorskip("torch", reason="bitsandbytes cannot be imported without torch")
    (tmp_path / "patches.py").write_text("raise SystemExit('the user module ran')")
    result = start(tmp_path, call="import bitsandbytes; bitsandbytes.nn.Linear4bit")
    assert "'bnb_patches.autoload'" in result.stdout


def test_a_folder_without_init_is_not_in_the_way(tmp_path):
    (tmp_path / "patches").mkdir()
    assert ".autoload'" in start(tmp_path).stdout


def test_a_module_of_the_users_that_is_imported_already_stays(tmp_path):
    (tmp_path / "patches.py").write_text("mine = 1")
    result = start(tmp_path, before="import patches; assert patches.mine")
    assert "'bnb_patches.autoload'" in result.stdout and "'patches'" in result.stdout


def test_a_broken_installation_is_one_warning(tmp_path):
    (tmp_path / "bnb_patches_autoload.py").write_text((ROOT / "bnb_patches_autoload.py").read_text())
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "__init__.py").write_text("")
    (tmp_path / "patches" / "autoload.py").write_text("raise ImportError('half installed')")
    result = start(tmp_path, root=tmp_path)
    assert result.stderr.count("WARNING") == 1 and "ImportError: half installed" in result.stderr
