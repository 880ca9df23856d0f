"""``patches.quantize_experts``: the experts of a mixture in 4 bits, as the ``BitsAndBytesConfig`` of the model says."""

from __future__ import annotations

from typing import TypeVar

from ..repairs.helpers.experts.quantize import quantize_model

Model = TypeVar("Model")

OLDEST = "5"
"""Older releases of transformers keep each expert as linear layers, which ``load_in_4bit`` quantizes by itself."""


def check_stack() -> None:
    """An error if the installed libraries are too old for experts in 4 bits."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.version import Version

    for package, oldest in (("transformers", OLDEST), ("bitsandbytes", "0.46.1"), ("torch", "2.6")):
        try:
            installed = version(package)
        except PackageNotFoundError:
            raise RuntimeError(f"quantize_experts needs {package}>={oldest}, which is not installed") from None
        if Version(installed) < Version(oldest):
            raise RuntimeError(
                f"quantize_experts needs {package}>={oldest}, installed is {installed}. transformers 4 keeps each "
                "expert as linear layers, which load_in_4bit quantizes by itself: nothing is to be done there."
            )


def quantize(model: Model) -> Model:
    """What ``patches.quantize_experts(model)`` does."""
    check_stack()
    from ..repairs.helpers.experts.products import know_transformers

    quantize_model(model)
    know_transformers()
    return model
