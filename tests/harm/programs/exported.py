"""``torch.export``, strict and not: run, saved, and loaded in a process without the plugin."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from .. import elsewhere
from ..catalogue import program
from ..checks import same
from ..layers import Quantized

KINDS = ("nf4-double", "int8")
REFUSED = (
    "(?i)export|serializ|fake|SCB|outlier|symbol|data-dependent|GuardOn|constant|unsupported|graph|mutat|attribute"
)


def export(q: Quantized, strict: bool, warm: bool, **options: Any) -> torch.export.ExportedProgram:
    model = torch.nn.Sequential(q.layer).eval()
    with torch.no_grad():
        if warm:
            model(q.x)
        return torch.export.export(model, (q.x,), strict=strict, **options)


def run(q: Quantized, exported: torch.export.ExportedProgram):
    """The program here, and then the layer that it was made from."""
    with torch.no_grad():
        yield q.right(exported.module()(q.x))
        yield q.right(q.layer(q.x))


def carry(q: Quantized, exported: torch.export.ExportedProgram):
    """The program saved, and run in another process."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.pt2")
        torch.export.save(exported, path)
        (out,) = elsewhere.call("run_exported", path, [q.x])
        yield q.right(out)


def exports(**options: Any):
    return program(**{"kinds": KINDS, "compiles": True, "may_raise": REFUSED, "devices": ["cpu"], **options})


@exports()
def traced(q: Quantized):
    """``strict=False``, of a layer that has run."""
    yield from run(q, export(q, strict=False, warm=True))


@exports()
def traced_cold_and_saved(q: Quantized):
    """``strict=False``, of a layer that has never run; in another process."""
    yield from carry(q, export(q, strict=False, warm=False))


@exports(packs="too")
def strict(q: Quantized):
    """``strict=True``, of a layer that has run."""
    yield from run(q, export(q, strict=True, warm=True))


@exports(kinds=("nf4", "nf4-double", "int8", "int8-threshold"), packs="too")
def strict_and_saved(q: Quantized):
    """The same, in another process."""
    yield from carry(q, export(q, strict=True, warm=True))


@exports(packs="too")
def strict_cold(q: Quantized):
    """``strict=True``, of a layer that has never run."""
    yield from run(q, export(q, strict=True, warm=False))


@exports()
def strict_cold_and_saved(q: Quantized):
    """The same, in another process."""
    yield from carry(q, export(q, strict=True, warm=False))


@exports(kinds=("nf4",), bias=True)
def of_any_batch(q: Quantized):
    """A dynamic batch, with a bias."""
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = export(q, strict=False, warm=True, dynamic_shapes=({0: batch},))
    with torch.no_grad():
        for rows in (4, 9, 2):
            x = q.inputs(rows)
            yield q.right(exported.module()(x), x)


@exports(kinds=("nf4-double", "int8", "int8-threshold"), packs="too")
def without_operators_of_the_plugin(q: Quantized):
    """Whose operators the program calls: only those of who is sure to be there when it is loaded."""
    for warm in (True, False):
        exported = export(q.other(seed=0), strict=True, warm=warm)
        called = {n.target.namespace for n in exported.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
        yield same(called - {"aten", "bitsandbytes", "_c10d_functional", "higher_order"}, set())


@exports()
def the_layer_goes_on(q: Quantized):
    """The export fails or not: the layer that it was tried on infers and trains as before."""
    for strictly in (True, False):
        try:
            export(q, strict=strictly, warm=False)
        except Exception:  # whatever it is, the program is about what comes after
            pass
    with torch.no_grad():
        yield q.right(q.layer(q.x))
    x = q.inputs(grad=True)
    q.layer.train()(x).sum().backward()
    yield q.gradient(x)
