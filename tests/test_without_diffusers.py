"""A program that does not use diffusers pays nothing for its patches, whether diffusers is installed or not."""

from __future__ import annotations

import json

import pytest

from patches import REGISTRY

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

IDS = {patch.id for patch in REGISTRY.patches.values() if patch.package == "diffusers"}
PROGRAM = """
    import importlib.metadata, json, sys

    if "hidden" in sys.argv:
        upstream = importlib.metadata.distribution

        def distribution(name):
            if name == "diffusers":
                raise importlib.metadata.PackageNotFoundError(name)
            return upstream(name)

        importlib.metadata.distribution = distribution
    asked = []

    class Watch:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "diffusers":
                asked.append(name)

    sys.meta_path.insert(0, Watch())
    import bnb_patches_autoload
    import torch
    bnb_patches_autoload.wait()
    import bitsandbytes
    bnb_patches_autoload.start()
    import transformers, peft, accelerate
    import patches
    patches.apply()
    report = patches.report()
    status = {result.id: result.status for result in report if result.id.startswith("diffusers-")}
    imported = sorted(name for name in sys.modules if name.partition(".")[0] == "diffusers")
    print(json.dumps([imported, asked, status, len(report.with_status(patches.Status.APPLIED))]))
"""


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "not installed"])
def test_nothing_of_diffusers_is_imported_or_looked_for(forked, installed):
    """By the automatic path, `apply` and `report`, beside all that a program of transformers and peft imports."""
    if installed:
        pytest.importorskip("diffusers", reason="diffusers is not installed")
    said = forked(PROGRAM, *(() if installed else ("hidden",)), PATCHES_AUTOLOAD="1")
    imported, asked, status, applied = json.loads(said.splitlines()[-1])
    assert imported == asked == [] and applied > 10
    assert status.keys() == IDS and set(status.values()) <= (
        {"pending", "not affected"} if installed else {"not installed"}
    )


def test_a_patch_of_diffusers_is_applied_by_the_import_of_a_model(forked):
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    said = forked(
        """
        import bitsandbytes, bnb_patches_autoload, json
        bnb_patches_autoload.start()
        from diffusers import FluxTransformer2DModel
        import patches
        print(json.dumps([result.id for result in patches.report().with_status(patches.Status.APPLIED)]))
        """,
        PATCHES_AUTOLOAD="1",
    )
    assert {name for name in json.loads(said.splitlines()[-1]) if name.startswith("diffusers-")}
