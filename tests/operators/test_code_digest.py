"""Operators in compiled graphs: what one version of the code compiled is not found by another on disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import patches
from tests.releases import selected

pytest.importorskip("bitsandbytes")

STEP = """
import json, sys, torch
import bitsandbytes as bnb
import patches
from torch._dynamo.utils import counters
from tests import compiling

compiling.for_an_empty_cache()
patches.apply()
torch.manual_seed(0)
layers = {
    "4-bit": bnb.nn.Linear4bit(64, 64, bias=False, compress_statistics=False, quant_type="nf4").to("cpu"),
    "int8": bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=6.0).to("cpu").eval(),
}
found = {}
for name in sys.argv[1:]:
    layer = layers[name]
    x = torch.ones(2, 64, requires_grad=True)
    counters.clear()
    torch.compile(layer, fullgraph=True)(x).sum().backward()
    aot = counters["aot_autograd"]
    found[name] = {"hit": aot["autograd_cache_hit"], "miss": aot["autograd_cache_miss"], "grad": x.grad.flatten().tolist()}
from patches.operators import int8_linear, linear_4bit, require_grad

names = [module.OPERATOR.name() for module in (int8_linear, linear_4bit, require_grad)]
print(json.dumps({"names": names, "found": found}))
"""

CHANGES = {
    # in the function behind the operator itself
    "operators/int8_linear.py": ("SCB.unsqueeze(1).mul(1.0 / 127.0)", "SCB.unsqueeze(1).mul(2.0 / 127.0)"),
    # in a helper of a patch, called by the function of bitsandbytes that the operator expands to
    "four_bit/matmul4bit_saved_tensors.py": ("QuantState(absmax, code", "QuantState(absmax + absmax, code"),
}
"""Another version of the plugin: each change doubles the gradients of one layer, and no output."""


@pytest.fixture(scope="module")
def another_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = Path(patches.__path__[0])
    copy = shutil.copytree(
        package, tmp_path_factory.mktemp("another") / "patches", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, (old, new) in CHANGES.items():
        (file,) = (f for f in copy.rglob(Path(name).name) if f.match(name))
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
    for name in ("bnb_patches", "bnb_patches_autoload.py"):
        (copy.parent / name).symlink_to(package.parent / name)
    return copy.parent


LAYERS = pytest.mark.parametrize(
    "layer", ["int8", pytest.param("4-bit", marks=pytest.mark.release("INT8, whose operator is another"))]
)


@pytest.fixture(scope="module")
def steps(request, fresh, forked, tmp_path_factory, another_version) -> list[dict]:
    """Three processes in turn with one cache: the plugin, the plugin again, another version of it.

    The second has another hash seed than the first, a fork of a process that drew one.
    """
    cache = str(tmp_path_factory.mktemp("cache"))

    def step(run: Callable[..., str], folder: Path | None = None, **environ: str) -> dict:
        path = os.environ["PYTHONPATH"] if folder is None else f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"
        env = {"TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": path, **environ}
        return json.loads(run(STEP, *selected(request, "layer"), cwd=folder, **env).splitlines()[-1])

    return [step(forked), step(fresh, PYTHONHASHSEED="2"), step(forked, another_version)]


@LAYERS
def test_a_repair_reaches_who_has_a_warm_cache(steps, layer):
    first, same, other = (step["found"][layer] for step in steps)
    assert (first["miss"], first["hit"]) == (1, 0)
    assert (same["miss"], same["hit"]) == (0, 1) and same["grad"] == first["grad"]
    assert (other["miss"], other["hit"]) == (1, 0)
    twice = [2 * value for value in first["grad"]]
    assert other["grad"] == pytest.approx(twice), "the graph of the other version was taken"


def test_a_name_is_the_same_in_every_process(steps):
    first, same, other = (step["names"] for step in steps)
    assert first == same and len(set(first)) == 3, "whatever the hash seed"
    assert first != other, "and not in another version"


def test_the_digest_is_one_of_all_code_that_is_reached():
    from bitsandbytes.autograd import _functions
    from patches.operators.code_digest import versioned_name

    def name() -> str:
        return versioned_name("name", _functions.MatMul4Bit)

    before = name()
    with patches.applied("bitsandbytes-matmul4bit-saved-tensors"):
        assert name() != before, "what is patched is other code"
    assert name() == before

    def digest(source: str) -> str:
        scope: dict = {"__name__": "bnb_patches.made"}
        exec(source, scope)
        return versioned_name("name", scope["root"])

    source = "LIMIT = 1\ndef helper(x, y=2):\n    return x in {'a', 'b'}\ndef root(x):\n    return helper(x) + LIMIT\n"
    names = [digest(source.replace(*change)) for change in (
        ("", ""), ("LIMIT = 1", "LIMIT = 3"), ("y=2", "y=3"), ("'b'", "'c'"), ("x in", "x not in"), ("+ LIMIT", "- LIMIT"),
    )]  # fmt: skip
    assert len(set(names)) == len(names)
    assert digest("\n\n" + source) == names[0], "where it stands does not matter"
