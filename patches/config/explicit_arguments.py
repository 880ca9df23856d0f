"""Which arguments a ``BitsAndBytesConfig`` was given, and which are its defaults."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ..engine import Rewrite

COMPUTE, THRESHOLD = "bnb_4bit_compute_dtype", "llm_int8_threshold"
CHOSEN = "chosen"  # the user gave the compute dtype for a checkpoint that has one of its own
_MAX_ENTRIES = 1000

_given: OrderedDict[int, tuple[float, frozenset[str]]] = OrderedDict()
"""The names of the arguments that a configuration was given, by the ``id`` of the float object that is its threshold.

Copies of a configuration, which the ``AutoModel`` classes make, share that object. An attribute of ours would be saved
with the configuration.
"""


def record_arguments(threshold: Any, compute_dtype: Any) -> Any:
    """Return ``threshold`` as a new object, and note by it which of both arguments were given."""
    from transformers import BitsAndBytesConfig

    if type(threshold) is not float:
        return threshold
    names = {COMPUTE} if compute_dtype is not None else set()
    if not any(threshold is default for default in BitsAndBytesConfig.__init__.__defaults__ or ()):
        names.add(THRESHOLD)
    return _note(threshold, names)


def _note(threshold: float, names: set[str]) -> float:
    threshold = float.fromhex(threshold.hex())  # never the same object
    _given[id(threshold)] = threshold, frozenset(names)
    while len(_given) > _MAX_ENTRIES:
        _given.popitem(last=False)
    return threshold


def explicit_names(config: Any) -> frozenset[str] | None:
    """Return the names of the arguments that ``config`` was given; None if it was made before the plugin was applied."""
    threshold, found = _given.get(id(config.llm_int8_threshold), (None, frozenset()))
    return found if threshold is config.llm_int8_threshold else None


def record_chosen_dtype(config: Any) -> None:
    """Note that the user chose the compute dtype of ``config``, an object that is not shared."""
    if type(config.llm_int8_threshold) is float:
        config.llm_int8_threshold = _note(config.llm_int8_threshold, {*(explicit_names(config) or ()), CHOSEN})


RECORD_ARGUMENTS = Rewrite(
    "transformers.utils.quantization_config:BitsAndBytesConfig.__init__",
    find="self.llm_int8_threshold = llm_int8_threshold",
    replace="self.llm_int8_threshold = _patches_noted(llm_int8_threshold, bnb_4bit_compute_dtype)",
    names={"_patches_noted": record_arguments},
)
"""The edit that notes the arguments, for each patch that asks for them."""
