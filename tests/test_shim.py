"""The way in: the automatic path uses the name ``bnb_patches``, and ``patches`` stays the user's who has one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests import forks

ROOT = Path(__file__).resolve().parent.parent
START = """
import logging, sys
logging.basicConfig(format="%(levelname)s %(message)s")
import bnb_patches_autoload
{call}
print(sorted(n for n in sys.modules if n.split(".")[0] in ("patches", "bnb_patches")))
"""
ALONE = f"""
import os, sys
sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != {str(ROOT)!r}]
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
"""
"""Without the checkout that runs the tests."""


def run(code: str, folder: Path, *path: Path | str, warm: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process in ``folder``, with the folders ``path`` first on the path of modules.

    It is a fresh one, or ``warm``: torch and transformers are imported (:mod:`.forks`).
    """
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    env = {**os.environ, "PATCHES_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(map(str, (*path, *known)))}
    if warm:
        (result,) = forks.run(forks.Program(["-c", code], env, str(folder)), timeout=300)
    else:
        result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def start(
    folder: Path, before: str = "", root: Path = ROOT, call: str = "bnb_patches_autoload.start()", warm: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the shim in a process whose working directory, ``folder``, comes first on the path."""
    path = f"import sys; sys.path[:0] = [{str(folder)!r}]; sys.path.append({str(root)!r})"
    return run("\n".join([path, before, START.replace("{call}", call)]), folder, warm=warm)


def test_alone_it_imports_bnb_patches_and_says_nothing(tmp_path):
    result = start(tmp_path)
    assert "'bnb_patches.autoload'" in result.stdout and "'patches" not in result.stdout
    assert result.stderr == ""


def test_switched_off_it_imports_nothing(tmp_path):
    off = "import os; os.environ['PATCHES_AUTOLOAD'] = ' Off '"
    result = start(tmp_path, before=off)
    assert result.stdout == "[]\n" and result.stderr == ""


def test_switched_off_there_is_still_a_name_where_another_is_in_the_way(tmp_path):
    (tmp_path / "patches.py").write_text("mine = 1")
    off = "import os; os.environ['PATCHES_AUTOLOAD'] = '0'"
    result = start(tmp_path, before=off, call="bnb_patches_autoload.start(); import bnb_patches; bnb_patches.apply")
    assert "'bnb_patches.api'" in result.stdout and result.stderr == ""


@pytest.mark.parametrize("kind", ["file", "package"])
def test_a_module_of_the_users_is_neither_run_nor_in_the_way(tmp_path, kind):
    theirs = tmp_path / ("patches.py" if kind == "file" else "patches/__init__.py")
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("raise SystemExit('the user module ran')")
    result = start(tmp_path)
    assert "'bnb_patches.autoload'" in result.stdout and "'patches'" not in result.stdout
    assert result.stderr == ""


@pytest.mark.skipif(
    not entry_points(group="bitsandbytes.backends", name="bnb_patches"), reason="bnb-patches is not installed here"
)
def test_a_module_of_the_users_does_not_break_the_import_of_bitsandbytes(tmp_path):
    pytest.importorskip("torch", reason="bitsandbytes cannot be imported without torch")
    (tmp_path / "patches.py").write_text("raise SystemExit('the user module ran')")
    result = start(tmp_path, call="import bitsandbytes; bitsandbytes.nn.Linear4bit", warm=True)
    assert "'bnb_patches.autoload'" in result.stdout


def test_a_folder_without_init_is_not_in_the_way(tmp_path):
    (tmp_path / "patches").mkdir()
    assert ".autoload'" in start(tmp_path).stdout


def test_a_module_of_the_users_that_is_imported_already_stays(tmp_path):
    (tmp_path / "patches.py").write_text("mine = 1")
    result = start(tmp_path, before="import patches; assert patches.mine")
    assert "'bnb_patches.autoload'" in result.stdout and "'patches'" in result.stdout


def test_a_broken_installation_is_one_warning(tmp_path):
    shutil.copy(ROOT / "bnb_patches_autoload.py", tmp_path)
    (tmp_path / "bnb_patches").mkdir()
    (tmp_path / "bnb_patches" / "__init__.py").write_text("")
    (tmp_path / "bnb_patches" / "autoload.py").write_text("raise ImportError('half installed')")
    result = start(tmp_path, root=tmp_path)
    assert result.stderr.count("WARNING") == 1 and "ImportError: half installed" in result.stderr


# -- two names, one package ----------------------------------------------------------------------


@pytest.mark.parametrize("first", ["patches", "bnb_patches"])
def test_both_names_give_the_same_modules(tmp_path, first):
    code = f"""
        import {first}
        import patches, bnb_patches, pickle, sys
        import patches.engine.gate as one, bnb_patches.engine.gate as other
        from patches.engine import edits
        from bnb_patches.engine.edits import Rewrite
        from patches.process_registry import REGISTRY
        assert patches is bnb_patches and one is other and edits.Rewrite is Rewrite
        assert REGISTRY is patches.REGISTRY is bnb_patches.REGISTRY
        assert one.__spec__.name == one.__name__ == "bnb_patches.engine.gate"
        assert sys.modules["patches.engine.gate"] is one and pickle.loads(pickle.dumps(patches.Report)) is patches.Report
    """
    run("\n".join(line.strip() for line in code.splitlines()), tmp_path)


THEIRS = {"package": {"__init__.py": "", "vit.py": "who = 'mine'"}, "folder": {"vit.py": "who = 'mine'"}}


def lay(folder: Path, kind: str) -> Path:
    """A ``patches`` of a user's in ``folder``: a regular package, or a folder without ``__init__.py``."""
    (folder / "patches").mkdir(parents=True)
    for name, text in THEIRS[kind].items():
        (folder / "patches" / name).write_text(text)
    return folder


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("where", ["sys.path.insert(0, lib)", "sys.path.append(lib)"])
@pytest.mark.parametrize("begun", ["bnb_patches_autoload.start()", "pass"])
def test_a_patches_that_comes_onto_the_path_late_stays_the_users(tmp_path, kind, where, begun):
    lib = lay(tmp_path / "lib", kind)
    code = f"import sys, bnb_patches_autoload; {begun}; lib = {str(lib)!r}; {where}\nfrom patches.vit import who; print(who)"
    assert run(code, tmp_path).stdout == "mine\n"


def test_beside_a_folder_of_the_users_ours_is_still_there(tmp_path):
    lib = lay(tmp_path / "lib", "folder")
    code = "import patches, patches.vit, patches.engine.gate as g; patches.report; assert g.__name__ == 'bnb_patches.engine.gate'"
    run(code, tmp_path, lib)
    with_error = "import patches\ntry: import patches.no_such\nexcept ModuleNotFoundError as e: print(e.name)"
    assert run(with_error, tmp_path, lib).stdout == "patches.no_such\n"


def test_where_theirs_raises_that_is_what_the_user_sees(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "patches.py").write_text("raise RuntimeError('of theirs')")
    code = f"""import sys; sys.path.append({str(tmp_path / "lib")!r})
try: import patches
except RuntimeError as error: print(error, "patches" in sys.modules)"""
    assert run(code, tmp_path).stdout == "of theirs False\n"


@pytest.mark.skipif(
    not entry_points(group="bitsandbytes.backends", name="bnb_patches"), reason="bnb-patches is not installed here"
)
def test_pytest_with_a_folder_of_tests_named_patches(tmp_path):
    """``tests/patches/test_it.py`` under pytest, which puts ``tests`` first on the path once the plugin is in."""
    pytest.importorskip("bitsandbytes", reason="it is its import that starts the plugin")
    tests = lay(tmp_path / "tests", "package") / "patches"
    (tests / "test_it.py").write_text(
        "from patches.vit import who\nimport sys\ndef test_it():\n"
        "    assert who == 'mine' and 'bnb_patches.autoload' in sys.modules\n"
    )
    (tmp_path / "conftest.py").write_text("import bitsandbytes\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    code = "import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests']))"
    assert "1 passed" in run(code, tmp_path, warm=True).stdout


def test_on_the_command_line_under_either_name(tmp_path):
    for name in ("patches", "bnb_patches"):
        line = [sys.executable, "-m", name, "list", "peft-dora-cache"]
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "") and "peft-dora-cache" in done.stdout


# -- installed in another way --------------------------------------------------------------------


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The plugin without its ``.py`` files, and in an archive."""
    import compileall

    folder = tmp_path_factory.mktemp("pyc")
    for name in ("patches", "bnb_patches"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "bnb_patches_autoload.py", folder)
    archive = tmp_path_factory.mktemp("zip") / "deps.zip"
    with zipfile.ZipFile(archive, "w") as out:
        for file in folder.rglob("*"):
            out.write(file, file.relative_to(folder))
    assert compileall.compile_dir(folder, quiet=2, legacy=True)
    for file in folder.rglob("*.py"):
        file.unlink()
    return {"without .py files": folder, "in a zip": archive}


TRANSFORMERS = "import torch, transformers, accelerate.utils.modeling"


@pytest.mark.parametrize(
    ("how", "program"),
    [
        ("without .py files", "import bitsandbytes"),
        ("in a zip", TRANSFORMERS),
        pytest.param("without .py files", TRANSFORMERS, marks=pytest.mark.release("the other program, and a zip")),
        pytest.param(
            "in a zip", "import bitsandbytes", marks=pytest.mark.release("the other program, and without files")
        ),
    ],
)
def test_it_works_wherever_its_files_lie(tmp_path, copies, how, program):
    pytest.importorskip("bitsandbytes", reason="there is nothing to repair without the stack")
    code = f"""{ALONE}
import logging; logging.basicConfig(format="%(levelname)s %(message)s", level="WARNING")
{program}
import bnb_patches_autoload
bnb_patches_autoload.start() if "bitsandbytes" in sys.modules else bnb_patches_autoload.wait()
import bnb_patches as ours, patches
print(ours.__file__, patches is ours, len(ours.report().with_status(ours.Status.APPLIED)))
"""
    result = run(code, tmp_path, copies[how], warm=True)
    file, same, count = result.stdout.splitlines()[-1].split()
    assert file.startswith(str(copies[how])) and same == "True" and int(count) > 3
    assert "WARNING" not in result.stderr


def test_what_torch_calls_says_why_it_cannot_begin(tmp_path):
    """One line, and no error in the import of torch."""
    shutil.copy(ROOT / "bnb_patches_autoload.py", tmp_path)
    result = start(tmp_path, root=tmp_path, call="bnb_patches_autoload.wait()")
    assert result.stderr.count("WARNING bnb-patches is not active") == 1, result.stderr
    assert "there is no imports in" in result.stderr


# -- another distribution with a package `patches` -----------------------------------------------


def test_another_distribution_has_overwritten_our_second_name(tmp_path):
    """pip lets it; what is ours goes on under ``bnb_patches`` and says whose file that is."""
    for name in ("patches", "bnb_patches"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "bnb_patches_autoload.py", tmp_path)
    (tmp_path / "patches" / "__init__.py").write_text("who = 'acme'\n")
    info = tmp_path / "acme_patches-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-patches\nVersion: 1.0\n")
    (info / "RECORD").write_text("patches/__init__.py,,\n")
    code = f"""{ALONE}
import logging; logging.basicConfig(format="%(levelname)s %(message)s")
import bnb_patches_autoload; bnb_patches_autoload.start()
import patches, bnb_patches; print(patches.who)
print([note for note in bnb_patches.report().notes if "acme-patches" in note])
"""
    result = run(code, tmp_path, tmp_path)
    assert result.stdout.startswith("acme\n") and "import bnb_patches" in result.stdout, result.stdout + result.stderr
    assert result.stderr.count("WARNING") == 1 and "acme-patches" in result.stderr
