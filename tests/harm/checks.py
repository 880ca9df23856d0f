"""What a program shows: a result beside its reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True)
class Check:
    """One result of a program.

    ``right`` is whether it agrees with the reference; ``value`` is the result itself, for the comparison of bits
    between two runs, unless ``rounding`` says why the bits of a right result may differ.
    """

    right: bool
    figure: str
    value: Any = None
    rounding: str = ""


def close(result: torch.Tensor, reference: torch.Tensor, tolerance: float, rounding: str = "") -> Check:
    """``result`` has the shape of ``reference`` and lies within ``tolerance`` of it, relative to its norm.

    Parameters
    ----------
    rounding:
        Why a right result need not have the same bits patched and unpatched; empty where it must.
    """
    if isinstance(result, FakeTensor):  # what is left of a trace that went wrong
        return Check(False, "a tensor without numbers")
    kept = _kept(result)
    if kept.shape != reference.shape:
        return Check(False, f"shape {tuple(kept.shape)}, not {tuple(reference.shape)}", kept, rounding)
    found, expected = kept.double(), _kept(reference).double()
    scale = expected.norm().item() or 1.0
    error = (found - expected).norm().item() / scale
    return Check(error <= tolerance, f"relative error {error:.2g}", kept, rounding)  # NaN is not right


def same(result: Any, reference: Any, rounding: str = "") -> Check:
    """``result`` is ``reference``: equal, and for tensors of the same dtype and bit for bit."""
    if isinstance(reference, torch.Tensor):
        kept = _kept(result)
        return Check(equal(kept, _kept(reference)), f"{tuple(kept.shape)} of {kept.dtype}", kept, rounding)
    return Check(result == reference, f"{result!r}, expected {reference!r}", result, rounding)


def equal(one: Any, other: Any) -> bool:
    """Whether two results are the same, bit for bit if they are tensors."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(type(one) is type(other) and one == other)
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy, which no later write of the program reaches."""
    return tensor.detach().as_subclass(torch.Tensor).cpu().clone()
