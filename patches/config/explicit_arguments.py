"""Which arguments a ``BitsAndBytesConfig`` was given, and which are its defaults."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ..engine import Rewrite

COMPUTE, THRESHOLD = "bnb_4bit_compute_dtype", "llm_int8_threshold"
CHOSEN = "chosen"
"""The user gave the compute dtype for a checkpoint that has one of its own."""
_MOST = 1000

_given: OrderedDict[int, tuple[float, frozenset[str]]] = OrderedDict()
"""What was given to a configuration, by the very number that is its threshold.

Copies of a configuration, which the ``AutoModel`` classes make, share that object, and no attribute of ours is saved with it.
"""


def record_arguments(threshold: Any, compute_dtype: Any) -> Any:
    """``threshold``, as an object of its own that says which of both were given."""
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
    while len(_given) > _MOST:
        _given.popitem(last=False)
    return threshold


def explicit_names(config: Any) -> frozenset[str] | None:
    """What was given to ``config``; None if it was made before the plugin was applied."""
    threshold, found = _given.get(id(config.llm_int8_threshold), (None, frozenset()))
    return found if threshold is config.llm_int8_threshold else None


def record_chosen_dtype(config: Any) -> None:
    """Note that the user chose the compute dtype of ``config``, which is not shared with anybody."""
    if type(config.llm_int8_threshold) is float:
        config.llm_int8_threshold = _note(config.llm_int8_threshold, {*(explicit_names(config) or ()), CHOSEN})


RECORD_ARGUMENTS = Rewrite(
    "transformers.utils.quantization_config:BitsAndBytesConfig.__init__",
    find="self.llm_int8_threshold = llm_int8_threshold",
    replace="self.llm_int8_threshold = _patches_noted(llm_int8_threshold, bnb_4bit_compute_dtype)",
    names={"_patches_noted": record_arguments},
)
"""The edit that notes it: of each patch that asks."""
