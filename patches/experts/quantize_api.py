"""``patches.quantize_experts``: the experts of a mixture in 4 bits, as the ``BitsAndBytesConfig`` of the model says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..engine import gate
from . import quantize_request

Model = TypeVar("Model")

LOADING_PATCH = "transformers-experts-of-linear-layers"
REQUIREMENTS = ("transformers>=5", "bitsandbytes>=0.46.1", "torch>=2.6")
REMARKS = {
    "transformers": " transformers 4 keeps each expert as linear layers, which load_in_4bit quantizes: there is nothing "
    "to do."
}


def check_stack() -> None:
    """An error if the installed libraries are too old for experts in 4 bits."""
    for needed in REQUIREMENTS:
        package = needed.partition(">")[0]
        installed = gate.installed(package)
        if installed is None:
            raise RuntimeError(f"quantize_experts needs {needed}, which is not installed")
        if not gate.satisfied(needed):
            raise RuntimeError(f"quantize_experts needs {needed}, installed is {installed}.{REMARKS.get(package, '')}")


def quantize_experts(model: Model) -> Model:
    """What ``patches.quantize_experts(model)`` does."""
    check_stack()
    from .products import register_transformers_operators
    from .quantize import quantize_model

    quantize_model(model)
    register_transformers_operators()
    return model


class QuantizeRequest:
    """What ``patches.quantize_experts()`` gives: experts are quantized in models that are loaded inside of the ``with``."""

    def __init__(self, is_applied: Callable[[str], bool]) -> None:
        """``is_applied`` says whether the patch of an id is."""
        check_stack()
        self._is_applied = is_applied
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        import transformers.core_model_loading
        import transformers.modeling_utils  # noqa: F401 - a patch that waits for these modules is applied now

        if not self._is_applied(LOADING_PATCH):
            raise RuntimeError(
                f"quantize_experts() needs the patch {LOADING_PATCH}, which is not applied. Call patches.apply() first; "
                "patches.report() says why a patch is not applied. patches.quantize_experts(model) works without it."
            )
        entered = quantize_request.requested()
        entered.__enter__()
        self._entered.append(entered)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
