"""The 4-bit operator: cached on disk for the next process, and expanded to what stood there before."""

from __future__ import annotations

import json

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import patches
from tests import releases

bnb = pytest.importorskip("bitsandbytes")

ID = "bitsandbytes-matmul4bit-aot-cache"


def layer_of(device: str, dtype: torch.dtype = torch.float32, **kwargs) -> torch.nn.Module:
    torch.manual_seed(0)
    kwargs = {"quant_type": "nf4", "compute_dtype": dtype, "bias": False, **kwargs}
    return bnb.nn.Linear4bit(128, 64, **kwargs).to(dtype).to(device)


def step(call, layer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.float().square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]


def lowered(call, x: torch.Tensor) -> list[list[str]]:
    """What the backend is given to lower, forward and backward: inputs in any order, then each operation."""
    found: list[list[str]] = []

    def described(node) -> str:
        value = node.meta.get("val")
        shape = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        return f"{node.op if node.op == 'placeholder' else node.target}: {shape}"

    def viewed(node):
        """What a view of packed weights looks at: before 2.13 torch saves such a view in place of its source."""
        value = node.meta.get("val")
        while node.target is torch.ops.aten.view.default and value.dtype == torch.uint8:
            node = node.args[0]
        return node

    def keep(graph, _):
        inputs = sorted(described(n) for n in graph.graph.nodes if n.op == "placeholder")
        rest = [n for n in graph.graph.nodes if n.op != "placeholder" and viewed(n) is n]
        found.append(inputs + [described(n) for n in rest])
        (output,) = graph.graph.find_nodes(op="output")
        found[-1] += sorted(described(viewed(n)) for n in output.all_input_nodes)  # results, and what backward is left
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    compiled(x.clone().requires_grad_()).square().sum().backward()
    return found


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain-absmax", "nested"])
def test_what_is_lowered_and_saved_stays_what_it_was(nested, checkpointed, device):
    layer = layer_of(device, compress_statistics=nested)
    x = torch.randn(2, 3, 128, device=device)
    layer(x)  # settles compute_dtype, which is another patch's matter

    def call(x):
        return checkpoint(layer, x.sin(), use_reentrant=False) if checkpointed else layer(x.sin())

    before = lowered(call, x)
    with patches.applied(ID):
        after = lowered(call, x)
    assert len(before) == 2 and any("bitsandbytes" in line for line in before[0])
    assert before == after


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16, "compress_statistics": False},
        {"bias": True, "dtype": torch.bfloat16},
        {"quant_type": "fp4"},
    ],
    ids=str,
)
def test_the_bits_of_eager(kwargs, device):
    if kwargs.get("quant_type") == "fp4" and device == "cpu" and bnb.__version__ < "0.47":
        pytest.skip("0.46 has no fp4 kernel for the CPU")
    dtype = kwargs.get("dtype", torch.float32)
    x = torch.randn(2, 3, 128, dtype=dtype, device=device)
    layer = layer_of(device, **kwargs)
    expected = step(layer, layer, x)
    with patches.applied(ID):
        assert all(map(torch.equal, step(layer, layer, x), expected)), "eager changed"
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        got = step(compiled, layer, x)
        assert len(got) == len(expected) and all(map(torch.equal, got, expected))
        with torch.no_grad():
            layer.eval()
            for other in (x[0], x[0, :1], x[:0]):
                assert torch.equal(compiled(other), layer(other))


TWICE = """
import json, sys, torch
import bitsandbytes as bnb
import patches
from torch._dynamo.utils import counters
from tests import compiling

compiling.for_an_empty_cache()
patches.apply(sys.argv[1], strict=True)
torch.manual_seed(0)
layer = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32).to("cpu")
x = torch.randn(2, 64, requires_grad=True)
y = torch.compile(layer, fullgraph=True)(x)
y.sum().backward()
aot = counters["aot_autograd"]
found = {name: aot[f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")}
print(json.dumps({**found, "y": y.tolist(), "grad": x.grad.tolist()}))
"""


@releases.of_the_newest
def test_the_next_process_finds_it(forked, tmp_path):
    first, second = (
        json.loads(forked(TWICE, ID, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).splitlines()[-1]) for _ in range(2)
    )
    assert (first["miss"], first["hit"], first["bypass"]) == (1, 0, 0)
    assert (second["miss"], second["hit"], second["bypass"]) == (0, 1, 0)
    assert first["y"] == second["y"] and first["grad"] == second["grad"]
