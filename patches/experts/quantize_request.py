"""``patches.quantize_experts``: the experts of a mixture in 4 bits, as the ``BitsAndBytesConfig`` of the model says.

They are quantized in a model that is loaded, or while one is loaded: in a ``with``, or where the environment asks for it.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable
from typing import Any, TypeVar

from ..engine import gate

Model = TypeVar("Model")

VARIABLE = "PATCHES_QUANTIZE_EXPERTS"
LOADING_PATCH = "transformers-experts-of-linear-layers"
REQUIREMENTS = ("transformers>=5", "bitsandbytes>=0.46.1", "torch>=2.6")
REMARKS = {
    "transformers": " transformers 4 keeps each expert as linear layers, which load_in_4bit quantizes: there is nothing "
    "to do."
}
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_REQUESTED: contextvars.ContextVar[bool] = contextvars.ContextVar("bnb_patches_quantize_experts", default=False)


def is_requested() -> bool:
    """Tell whether a ``with`` of this thread or the environment asks to quantize experts of models that are loaded.

    Raises `ValueError` for a value of ``PATCHES_QUANTIZE_EXPERTS`` that is neither on nor off.
    """
    if _REQUESTED.get():
        return True
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value not in ("", *_YES, *_NO):
        raise ValueError(f"{VARIABLE}={value!r} is not valid; expected one of {', '.join((*_YES, *_NO))}")
    return value in _YES


def check_stack() -> None:
    """Raise `RuntimeError` if the installed libraries are too old for experts in 4 bits."""
    for needed in REQUIREMENTS:
        package = needed.partition(">")[0]
        installed = gate.installed_version(package)
        if installed is None:
            raise RuntimeError(f"quantize_experts needs {needed}, which is not installed")
        if not gate.satisfied(needed):
            raise RuntimeError(f"quantize_experts needs {needed}, installed is {installed}.{REMARKS.get(package, '')}")


def quantize_experts(model: Model) -> Model:
    """Quantize the experts of a loaded model in place, and return it: ``patches.quantize_experts(model)``."""
    check_stack()
    from .products import register_transformers_operators
    from .quantize import quantize_model

    quantize_model(model)
    register_transformers_operators()
    return model


class QuantizeRequest:
    """``patches.quantize_experts()``: experts are quantized in models that are loaded inside of the ``with``."""

    def __init__(self, is_applied: Callable[[str], bool]) -> None:
        """``is_applied`` tells whether the patch of an id is applied."""
        check_stack()
        self._is_applied = is_applied
        self._tokens: list[contextvars.Token[bool]] = []

    def __enter__(self) -> None:
        import transformers.core_model_loading
        import transformers.modeling_utils  # noqa: F401 - a patch that waits for these modules is applied now

        if not self._is_applied(LOADING_PATCH):
            raise RuntimeError(
                f"quantize_experts() needs the patch {LOADING_PATCH}, which is not applied. Call patches.apply() first; "
                "patches.report() says why a patch is not applied. patches.quantize_experts(model) works without it."
            )
        self._tokens.append(_REQUESTED.set(True))

    def __exit__(self, *error: Any) -> None:
        _REQUESTED.reset(self._tokens.pop())
