"""A digest of results, in which every bit counts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any


def digest_of_results(*results: Any) -> str:
    """Return the SHA-256 of ``results``: tensors, plain values, and lists, tuples and mappings of them.

    Of a tensor count dtype, shape and every bit; of a mapping its keys, in their order. Classes do not count: a parameter
    and a tensor of the same bits are alike.

    Raises
    ------
    TypeError
        One of them is of another kind, such as a model: what of it counts is for the program to say.
    """
    found = hashlib.sha256()
    for piece in _pieces(results):
        found.update(len(piece).to_bytes(8, "little"))  # else two pieces could be cut elsewhere
        found.update(piece)
    return found.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    import torch

    if isinstance(value, torch.Tensor):
        plain = value.detach().as_subclass(torch.Tensor).cpu().contiguous()
        yield f"{plain.dtype} {tuple(plain.shape)}".encode()
        yield bytes(plain.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}".encode()
        for key, each in value.items():
            yield repr(key).encode()
            yield from _pieces(each)
    elif isinstance(value, (list, tuple)):
        yield f"sequence of {len(value)}".encode()
        for each in value:
            yield from _pieces(each)
    elif value is None or isinstance(value, (bool, bytes, float, int, str, torch.dtype)):
        yield repr(value).encode()
    else:
        raise TypeError(f"a digest is made of tensors and plain values, not of {type(value).__name__}")
