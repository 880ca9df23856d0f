"""Which arguments a ``BitsAndBytesConfig`` was given, and which are its defaults: the configuration has only the values.

Each configuration gets a threshold that is a float object of its own, and a table says by the ``id`` of that object
what was given. Copies of a configuration, which the ``AutoModel`` classes make, share the object. An attribute on the
configuration would be saved with it, and torch.compile would not take a subclass of float for a constant.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ..engine import Rewrite

COMPUTE, THRESHOLD = "bnb_4bit_compute_dtype", "llm_int8_threshold"
CHOSEN = "chosen"  # the user gave the compute dtype for a checkpoint that has one of its own
MAX_ENTRIES = 1000
_CONFIG_MODULES = ("transformers.utils.quantization_config", "diffusers.quantizers.quantization_config")

# Holds the float, so that its id stays its own.
_names_by_id: OrderedDict[int, tuple[float, frozenset[str]]] = OrderedDict()


def record_arguments(threshold: Any, compute_dtype: Any) -> Any:
    """Return ``threshold`` as an object of its own, for which is recorded which of both arguments were given."""
    if type(threshold) is not float:
        return threshold
    names = {COMPUTE} if compute_dtype is not None else set()
    if not any(threshold is default for default in _defaults()):
        names.add(THRESHOLD)
    return _record(threshold, names)


def _defaults() -> Iterator[Any]:
    """Yield the defaults of all arguments of the configurations of both libraries, as far as they are imported."""
    for module in _CONFIG_MODULES:
        if module in sys.modules:
            yield from sys.modules[module].BitsAndBytesConfig.__init__.__defaults__ or ()


def _record(threshold: float, names: set[str]) -> float:
    new = float.fromhex(threshold.hex())  # equal, and never the same object
    _names_by_id[id(new)] = new, frozenset(names)
    while len(_names_by_id) > MAX_ENTRIES:
        _names_by_id.popitem(last=False)
    return new


def explicit_names(config: Any) -> frozenset[str] | None:
    """Return what was given to ``config``; None if it was made before the plugin was applied."""
    threshold, names = _names_by_id.get(id(config.llm_int8_threshold), (None, frozenset()))
    return names if threshold is config.llm_int8_threshold else None


def record_chosen_dtype(config: Any) -> None:
    """Record that the user chose the compute dtype of ``config``, which no other program holds."""
    if type(config.llm_int8_threshold) is float:
        config.llm_int8_threshold = _record(config.llm_int8_threshold, {*(explicit_names(config) or ()), CHOSEN})


RECORD_ARGUMENTS, RECORD_ARGUMENTS_OF_DIFFUSERS = (  # of each patch that asks
    Rewrite(
        f"{module}:BitsAndBytesConfig.__init__",
        find="self.llm_int8_threshold = llm_int8_threshold",
        replace="self.llm_int8_threshold = _patches_record_arguments(llm_int8_threshold, bnb_4bit_compute_dtype)",
        names={"_patches_record_arguments": record_arguments},
    )
    for module in _CONFIG_MODULES
)
