"""Programs without bitsandbytes: the entry point that torch calls, and what it costs the programs that need nothing."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import bnb_patches_autoload as shim
from patches import REGISTRY, autoload

pytest.importorskip("torch", reason="it is torch that calls the entry point")

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
import json, logging, sys
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
logging.getLogger("bnb_patches").addHandler(handler)
logging.getLogger("bnb_patches").setLevel("INFO")
{code}
ours = sorted(name for name in sys.modules if name.startswith("bnb_patches"))
module = sys.modules.get("patches") or sys.modules.get("bnb_patches")
started = hasattr(module, "REGISTRY")
applied = [r.id for r in module.report() if str(r.status) == "applied"] if started else []
watches = [f for f in sys.meta_path if type(f).__module__ == "bnb_patches_imports"]
modules = sorted(sys.modules)
print(json.dumps(dict(ours=ours, started=started, applied=applied, watches=len(watches), lines=lines, modules=modules)))
"""
HOOK = ["bnb_patches_autoload", "bnb_patches_imports"]


@pytest.fixture
def probe(fresh: Callable[..., str], site: Path) -> Callable[..., dict[str, Any]]:
    """Run ``code`` where the plugin is installed; what is then imported, applied and logged."""
    return functools.partial(_probed, fresh, site)


@pytest.fixture
def probe_forked(forked: Callable[..., str], site: Path) -> Callable[..., dict[str, Any]]:
    """The same where torch, transformers and accelerate are imported before the plugin is asked."""
    return functools.partial(_probed, forked, site)


def _probed(run: Callable[..., str], site: Path, code: str, root: Path = ROOT, **environ: str) -> dict[str, Any]:
    path = [str(site), str(root), os.environ["PYTHONPATH"]]
    environ = {"PATCHES_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(path), **environ}
    return json.loads(run(PROBE.replace("{code}", code), cwd=root, **environ).splitlines()[-1])


def test_every_package_that_needs_no_bitsandbytes_is_waited_for():
    alone = {p.package for p in REGISTRY.patches.values() if not any("bitsandbytes" in str(r) for r in p.requires)}
    assert alone == set(shim._WITHOUT_BITSANDBYTES)
    assert shim._NO == autoload._NO, "the switch means the same to both"


OTHER_ORDERS = ("import torchao.utils", "import transformers, torch")


@pytest.mark.parametrize(
    "code",
    [
        "import torch, torchao.utils",
        *(pytest.param(code, marks=pytest.mark.release("torch first")) for code in OTHER_ORDERS),
    ],
)
def test_they_are_repaired_in_whatever_order_they_are_imported(probe, code):
    package = next(name for name in shim._WITHOUT_BITSANDBYTES if name in code)
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    found = probe(f"{code}\nimport patches\nfor p in patches.REGISTRY.patches.values():\n"
                  f"    if p.id.startswith('{package}-'): patches.REGISTRY.import_targets(p)")  # fmt: skip
    assert [name for name in found["applied"] if name.startswith(package)]
    assert not found["watches"] and all(line.startswith("INFO") for line in found["lines"])


def test_torch_alone_gets_two_small_modules_and_nothing_else(probe):
    with_it = probe("import torch")
    without = probe("import torch", PATCHES_AUTOLOAD="0")  # not where it is not installed: here it may be
    assert with_it["ours"] == HOOK and without["ours"] == HOOK[:1]
    assert set(with_it["modules"]) - set(without["modules"]) == set(HOOK[1:])
    assert with_it["watches"] == 1 and not with_it["started"] and not with_it["lines"]


def test_it_can_be_switched_off(probe_forked):
    found = probe_forked("import torch, torchao", PATCHES_AUTOLOAD=" Off ")
    assert found["ours"] == HOOK[:1] and not found["watches"] and not found["applied"]


def test_torchs_own_switch_is_obeyed(probe):
    found = probe("import torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found["ours"] == [] and not found["started"]


@pytest.mark.parametrize(
    "file",
    [
        "bnb_patches/__init__.py",
        pytest.param("patches/engine/imports.py", marks=pytest.mark.release("another file of the plugin")),
    ],
)
def test_a_broken_installation_does_not_reach_the_import(probe, tmp_path, file):
    (tmp_path / "bnb_patches_autoload.py").write_text((ROOT / "bnb_patches_autoload.py").read_text())
    imports = (ROOT / "patches" / "engine" / "imports.py").read_text()
    sources = {"bnb_patches/__init__.py": "", "bnb_patches/autoload.py": "", "patches/engine/imports.py": imports}
    sources[file] = "raise ImportError('half installed')"
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = probe("import torch, torchao; torch.ones(1)", root=tmp_path)
    assert len(found["lines"]) == 1, found["lines"]
    assert all(line.startswith("WARNING bnb-patches is not active") for line in found["lines"])


def test_bitsandbytes_after_them_says_nothing_twice_and_what_was_reverted_stays_so(probe, probe_forked):
    pytest.importorskip("bitsandbytes")
    found = probe_forked("import torch, accelerate, patches; patches.revert(); import bitsandbytes")
    assert found["applied"] == []
    off = "import torch, accelerate, os; os.environ['PATCHES_AUTOLOAD'] = '0'; import bitsandbytes"
    assert not [name for name in probe_forked(off)["applied"] if name.startswith("bitsandbytes")]
    again = probe("import torch, accelerate, bitsandbytes")
    assert [name for name in again["applied"] if name.startswith("bitsandbytes")]
    assert len(again["lines"]) == len(set(again["lines"])) > 1
