"""`report` reads files and imports nothing, and says of each patch what `report --live` says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from patches import REGISTRY
from patches.command_line import glance
from tests.newer_releases import copies
from tests.test_report_anywhere import answers, run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="what the patches are for is not installed"
)
REPAIRED = ("accelerate", "bitsandbytes", "diffusers", "peft", "torch", "torchao", "transformers", "trl", "numpy")
WATCHED = f"""
import sys
from patches.command_line import main
code = main(sys.argv[1:])
print([name for name in {REPAIRED} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
DISABLED = {"PATCHES_DISABLE": "compile,peft-dora-cache"}
OFF = {"PATCHES_AUTOLOAD": "0"}


def from_files(path: Path | None = None, **environ: str) -> tuple[int, dict]:
    """Exit code and answer of `report --json`."""
    done = run("report", "--json", path=path, **environ)
    return done.returncode, json.loads(done.stdout)


def live(*environs: Mapping[str, str], path: Path | None = None) -> list[tuple[int, dict]]:
    """Exit code and answer of `report --live --json` with each of ``environs``, one after the other in one process."""
    lines = [("report", "--live", "--json")] * len(environs)
    asked = [{"PATCHES_AUTOLOAD": "1", **environ} for environ in environs]
    found = answers(*lines, path=path, environs=asked, PATCHES_AUTOLOAD="0")  # else its imports have applied some
    return [(code, json.loads(text)) for code, text, _ in found]


def compared(answer: tuple[int, dict]) -> dict:
    """What is the same from files and live. Of the diffs only the targets: values that an import makes are not known."""
    code, found = answer
    results = {r["id"]: {**r, "changes": sorted(change["target"] for change in r["changes"])} for r in found["results"]}
    return {**results, "code": code, "notes": found["notes"], "features": found["features"]}


def states(answer: tuple[int, dict]) -> Counter:
    return Counter(result["status"] for result in answer[1]["results"])


@pytest.mark.parametrize("arguments", [(), ("--all",), ("--json",), ("peft-dora-cache",)], ids=" ".join)
def test_it_imports_none_of_them(arguments):
    done = subprocess.run([sys.executable, "-c", WATCHED, "report", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]"), done.stderr


def test_a_program_that_imports_the_plugin_loads_no_code_of_the_command():
    program = "import sys, patches; print(*(name for name in sys.modules if name.startswith('bnb_patches.')))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "bnb_patches.engine.registry" in loaded
    assert not [name for name in loaded if "library_files" in name or "command_line" in name]


def test_it_says_what_live_says_of_the_installed_packages():
    """With some disabled, with all, and where no import applies any: the last says the least of what the process has."""
    asked = [DISABLED, {"PATCHES_DISABLE": ""}, {"PATCHES_DISABLE": "", **OFF}]
    for environ, there in zip(asked, live(*asked)):
        here = from_files(**environ)
        assert compared(here) == compared(there)
        assert here[0] == 0 and len(states(here)) > 1
    assert "PATCHES_AUTOLOAD is off" in str(here[1]["notes"])


@copies.NEEDS_NEWEST
def test_it_says_what_live_says_of_a_doctored_stack(tmp_path):
    """A newer bitsandbytes, of which one function is another; and a peft of the same number that someone has changed."""
    number = copies.NUMBERS["bitsandbytes"]
    new = copies.replace("quant_state = self.weight.quant_state", "quant_state = (self.weight).quant_state or None")
    copies.copy(tmp_path, "bitsandbytes", number, {"nn/modules.py": new})
    changed = copies.replace("self._dora_cache.clear()", "self._dora_cache = {}")
    change = {"tuners/lora/dora.py": changed, "__init__.py": lambda text: f"{text}\n"}
    copies.copy(tmp_path, "peft", importlib.metadata.version("peft"), change)
    here, (there,) = from_files(tmp_path), live({}, path=tmp_path)
    assert compared(here) == compared(there)
    assert here[0] == 1, "there is a conflict"
    found = {result["id"]: result for result in here[1]["results"]}
    assert found["peft-dora-cache"]["status"] == "conflict" and "occurs 0 times" in found["peft-dora-cache"]["reason"]
    assert states(here)["untested"] > 3 and states(here)["conflict"] == 1
    known = [r for r in found.values() if r["status"] == "applied" and r["reason"].startswith(f"bitsandbytes {number}")]
    assert len(known) > 10 and all("the source is that of" in r["reason"] for r in known)


@copies.NEEDS_NEWEST
def test_a_file_that_is_no_python_is_a_note_from_files_and_live(tmp_path):
    broken = {"nn/modules.py": lambda text: f"{text}\ndef (\n", "__init__.py": lambda text: f"{text}\n"}
    copies.copy(tmp_path, "bitsandbytes", importlib.metadata.version("bitsandbytes"), broken)
    code, here = from_files(tmp_path)
    ((_, there),) = live({}, path=tmp_path)
    why = "cannot be imported: SyntaxError: invalid syntax (modules.py, line "
    assert [note for note in here["notes"] if why in note and note.startswith("bitsandbytes.nn.modules ")]
    assert [note for note in there["notes"] if why in note]
    assert code == 0 and states((code, here))["pending"] > 20


def test_packages_that_are_too_old_and_a_former_id(tmp_path):
    info = tmp_path / "torch-2.5.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    here = from_files(tmp_path)
    found = states(here)
    assert found.keys() == {"not affected", "not installed"} and found["not affected"] > 100
    assert any("torch 2.5.1 is too old" in note for note in here[1]["notes"])
    former = next(patch for patch in REGISTRY.patches.values() if patch.former_ids)
    data = json.loads(run("report", "--json", former.former_ids[0]).stdout)
    assert [result["id"] for result in data["results"]] == [former.id]
    assert any(f"is called {former.id} now" in note for note in data["notes"])


def test_all_that_is_not_applied_is_in_the_short_form_with_its_reason():
    done = run("report", **DISABLED)
    lines = " ".join(done.stdout.split())
    found = {result["id"]: result for result in from_files(**DISABLED)[1]["results"]}
    off = [patch_id for patch_id, result in found.items() if result["status"] != "applied"]
    assert len(off) > 10 and all(f" {patch_id}" in lines for patch_id in off)
    assert all(f"{state}: " in lines for state in {found[patch_id]["status"] for patch_id in off})
    assert glance._MORE in lines
