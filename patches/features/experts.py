"""``patches.quantize_experts``: the experts of a mixture in 4 bits, as the ``BitsAndBytesConfig`` of the model says."""

from __future__ import annotations

from typing import Any, TypeVar

from ..engine import gate
from ..engine.report import Status
from ..registry import REGISTRY
from ..repairs.helpers.experts import asked_for

Model = TypeVar("Model")

READER = "transformers-experts-of-linear-layers"
NEEDS = ("transformers>=5", "bitsandbytes>=0.46.1", "torch>=2.6")
WHY = {
    "transformers": " transformers 4 keeps each expert as linear layers, which load_in_4bit quantizes: there is nothing "
    "to do."
}


def check_stack() -> None:
    """An error if the installed libraries are too old for experts in 4 bits."""
    for needed in NEEDS:
        package = needed.partition(">")[0]
        installed = gate.installed(package)
        if installed is None:
            raise RuntimeError(f"quantize_experts needs {needed}, which is not installed")
        if not gate.satisfied(needed):
            raise RuntimeError(f"quantize_experts needs {needed}, installed is {installed}.{WHY.get(package, '')}")


def quantize(model: Model) -> Model:
    """What ``patches.quantize_experts(model)`` does."""
    check_stack()
    from ..repairs.helpers.experts.products import know_transformers
    from ..repairs.helpers.experts.quantize import quantize_model

    quantize_model(model)
    know_transformers()
    return model


class Asked:
    """What ``patches.quantize_experts()`` gives: experts are quantized in models that are loaded inside of the ``with``."""

    def __init__(self) -> None:
        check_stack()
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        if not _reads():
            raise RuntimeError(
                f"quantize_experts() needs the patch {READER}, which is not applied. Call patches.apply() first; "
                "patches.report() says why a patch is not applied. patches.quantize_experts(model) works without it."
            )
        entered = asked_for.inside()
        entered.__enter__()
        self._entered.append(entered)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _reads() -> bool:
    """Whether models are loaded through our converters; what is pending is applied when transformers is imported."""
    import transformers.core_model_loading
    import transformers.modeling_utils  # noqa: F401 - what the patch edits

    return bool(REGISTRY.report(READER).with_status(Status.APPLIED))
