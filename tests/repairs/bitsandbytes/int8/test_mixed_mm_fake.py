"""The shape function of int8_mixed_scaled_mm, by torch's own check."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import patches

bnb = pytest.importorskip("bitsandbytes")
F = bnb.functional

ID = "bitsandbytes-int8-mixed-mm-fake"
OPERATOR = torch.ops.bitsandbytes.int8_mixed_scaled_mm.default


def arguments(dtype: torch.dtype, columns: int | None, bias: bool, device: str) -> tuple:
    torch.manual_seed(0)
    x = torch.randn(4, 32, dtype=dtype, device=device).clamp(-5, 5)
    x[:, : columns or 0] = 20
    threshold = 0.0 if columns is None else 6.0
    CA, SCA, found = F.int8_vectorwise_quant(x.to(torch.float16), threshold=threshold)
    CB, SCB, _ = F.int8_vectorwise_quant(torch.randn(16, 32, dtype=torch.float16, device=device))
    assert (found is None) if columns is None else (found.numel() == columns)
    return (x, CA, CB, SCA, SCB, found, torch.randn(16, dtype=dtype, device=device) if bias else None)


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("columns", [None, 0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_opcheck(dtype, columns, bias, device):
    found = arguments(dtype, columns, bias, device)
    with pytest.raises(Exception):  # noqa: B017  (torch raises what its check met)
        torch.library.opcheck(OPERATOR, found, test_utils="test_faketensor")
    with patches.applied(ID):
        torch.library.opcheck(OPERATOR, found, test_utils="test_faketensor")


def test_the_kernel_is_not_touched(device):
    found = arguments(torch.float16, 2, True, device)
    expected = OPERATOR(*found)
    with patches.applied(ID):
        assert all(map(torch.equal, OPERATOR(*found), expected))


def test_a_shape_function_that_is_not_there_is_a_conflict(monkeypatch):
    """As on a torch that keeps them elsewhere."""
    from torch._library import simple_registry

    nothing = SimpleNamespace(fake_impl=SimpleNamespace(kernel=None))
    monkeypatch.setattr(simple_registry.singleton, "find", lambda name: nothing)
    result = patches.apply(ID)[ID]
    assert result.status is patches.Status.CONFLICT and "no shape function" in result.reason
