"""What ``python -m tools.gpu`` found on a GPU, for ``docs/gpu.md``."""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks import does_not_fit, experts_on_device, present

from . import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
NONE = "No figure comes from a GPU yet: `python -m tools.gpu` was not run on a machine that has one."


def fragment() -> str:
    """The device, and a table of each step whose results are there."""
    smoke = _read("smoke.json")
    if not smoke:
        return NONE + "\n"
    parts = [_machine(smoke)]
    for title, file, table in (
        ("A model that does not fit", "does_not_fit.json", does_not_fit.table),
        ("A training step", "training.json", _steps),
        ("Experts in 4 bits", "experts_on_device.json", experts_on_device.table),
    ):
        found = _read(file)
        parts.append(f"## {title}\n\n" + (table(found) if found else f"Not measured: `{file}` is missing."))
    return "\n\n".join(parts) + "\n"


def verified() -> tuple[str, list[dict[str, Any]]]:
    """The torch that reproducers were run with on a GPU, and their rows."""
    return _read("smoke.json").get("versions", {}).get("torch", "0.0"), _read("verify.json").get("rows", [])


def _read(name: str) -> dict[str, Any]:
    file = RESULTS / name
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def _machine(smoke: dict[str, Any]) -> str:
    device, versions = smoke["device"], smoke["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version and name != "bnb-patches")
    rows = [(name, *(f"{found[key]:.3f}" for key in ("output", "gradient"))) for name, found in smoke["layers"].items()]
    return "\n\n".join(
        [
            f"{device['name']}, CUDA {device['cuda']}, Python {smoke['python']}; {packages}.",
            "A layer of 256 inputs and 128 outputs in bfloat16 beside the layer in float32 that it was quantized from, as shares "
            "of norms:",
            present.markdown(("layer", "output differs by", "gradient of the input"), rows),
        ]
    )


def _steps(data: dict[str, Any]) -> str:
    """The tables of the harness under headings of this page."""
    return re.sub(r"^(.+) \(\S+\)$", r"### \1", present.table(data), flags=re.MULTILINE)
