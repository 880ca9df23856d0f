"""In which dtypes 4-bit layers can compute, and the edits by which a ``BitsAndBytesConfig`` accepts no other."""

from __future__ import annotations

from typing import Any

from ..engine import Rewrite

_CAN_BE = ("float16", "bfloat16", "float32", "float64")


def dtype_named(dtype: str) -> Any:
    """Return the dtype that torch has by the name ``dtype``."""
    import torch

    found = getattr(torch, dtype, None)
    return found if isinstance(found, torch.dtype) else _checked(dtype)


def compute_dtype(config: Any) -> Any:
    """Return the compute dtype of ``config``; raise ``ValueError`` if 4-bit layers cannot compute in it."""
    return config.bnb_4bit_compute_dtype if not config.load_in_4bit else _checked(config.bnb_4bit_compute_dtype)


def _checked(dtype: Any) -> Any:
    name = str(dtype).removeprefix("torch.")
    if name not in _CAN_BE:
        raise ValueError(
            f"bnb_4bit_compute_dtype={dtype!r}: 4-bit layers cannot compute in it. Use torch.bfloat16, torch.float16 or "
            "torch.float32. The storage dtype of packed weights is bnb_4bit_quant_storage."
        )
    return dtype


def rewrite_config(config: str) -> tuple[Rewrite, ...]:
    """Return the edits of ``config``, a ``BitsAndBytesConfig`` as the target of an edit."""
    return (
        Rewrite.to_call(
            f"{config}.__init__", "getattr(torch, bnb_4bit_compute_dtype)", dtype_named, "bnb_4bit_compute_dtype"
        ),
        Rewrite(
            f"{config}.post_init",
            find="isinstance(self.bnb_4bit_compute_dtype, torch.dtype)",
            replace="isinstance(_patches_compute_dtype(self), torch.dtype)",
            names={"_patches_compute_dtype": compute_dtype},
        ),
    )
