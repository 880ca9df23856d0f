"""What the cases about 4-bit layers on CPUs with AVX512-BF16 share.

The measure of everything is the same layer told that its processor has not the instruction: it never packs.
"""

from __future__ import annotations

import copy

import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn import Linear4bit

import patches
from patches.operators import packed_copies

ID = "bitsandbytes-cpu-repack"
NESTED = pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
QUIET = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

SMALL = (128, 64)
LARGE = (1024, 512)
"""In and out. The codes of the large one are more than are compared as a whole in each call."""


@pytest.fixture(autouse=True)
def patched(unpatched):
    """Every case begins patched; ``patches.revert()`` in a case shows the defect."""
    assert has_avx512bf16(), "these cases are for a processor with AVX512-BF16, real or emulated"
    with patches.applied(ID):
        yield


@pytest.fixture
def made(monkeypatch) -> list:
    """The packed copies that are made."""
    made, pack = [], packed_copies._pack
    monkeypatch.setattr(packed_copies, "_pack", lambda *arguments: made.append(pack(*arguments)) or made[-1])
    return made


def make(nested: bool = False, shape: tuple[int, int] = SMALL, bias: bool = False, **options) -> Linear4bit:
    """A layer in eval mode, its rows of very different scale, as in trained models."""
    torch.manual_seed(0)
    options = {"compute_dtype": torch.bfloat16, "quant_type": "nf4", **options}
    layer = Linear4bit(*shape, bias=bias, compress_statistics=nested, **options)
    layer.weight.data.mul_(torch.logspace(-2, 1, shape[1])[:, None])
    return layer.bfloat16().to("cpu").eval()


def another(nested: bool = False, shape: tuple[int, int] = SMALL) -> Linear4bit:
    """A layer of the same kind with other codes and scales."""
    torch.manual_seed(3)
    layer = Linear4bit(*shape, bias=False, compress_statistics=nested, compute_dtype=torch.bfloat16, quant_type="nf4")
    return layer.bfloat16().to("cpu").eval()


def never(layer: torch.nn.Module) -> torch.nn.Module:
    """A copy of ``layer`` that never packs."""
    layer = copy.deepcopy(layer)
    for module in layer.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return layer


def inputs(*shape: int, grad: bool = False) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*(shape or (5, 128))).bfloat16().requires_grad_(grad)


def infer(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer(x)


def copies(layer: Linear4bit) -> dict:
    """The packed copies that hang on the memory of the layer's weight."""
    return vars(layer.weight.untyped_storage()).get(packed_copies._COPIES, {})


def holds_a_copy(layer: Linear4bit) -> bool:
    return layer.weight.data_ptr() in copies(layer)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def same_state(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Bit by bit equal, statistics included."""
    a, b = a.state_dict(), b.state_dict()
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k].flatten().view(torch.uint8), b[k].flatten().view(torch.uint8))
        for k in a
    )
