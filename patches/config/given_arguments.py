"""What a user's ``BitsAndBytesConfig`` changes in the configuration of a checkpoint that is quantized already."""

from __future__ import annotations

import copy
from typing import Any

from ..process.messages import LOGGER
from . import explicit_arguments, skip_list

_DEFAULTS = {explicit_arguments.COMPUTE: "torch.float32", explicit_arguments.THRESHOLD: "6.0"}


def _names_given(config: Any) -> set[str]:
    """Return which of both the user gave; if that was not recorded, the ones whose values are no default."""
    recorded = explicit_arguments.explicit_names(config) or frozenset()
    return {name for name, default in _DEFAULTS.items() if name in recorded or str(getattr(config, name)) != default}


def merge_given(config: Any, asked: Any) -> Any:
    """Return the configuration ``config`` of a checkpoint, with the arguments of the user's ``asked`` that take effect."""
    if type(config).__name__ != "BitsAndBytesConfig" or type(asked) is not type(config):
        return config
    names = {explicit_arguments.COMPUTE if config.load_in_4bit else explicit_arguments.THRESHOLD} & _names_given(asked)
    if names:
        config = copy.copy(config)
        vars(config).update({name: getattr(asked, name) for name in names})
        explicit_arguments.record_chosen_dtype(config)
    skip = asked.llm_int8_skip_modules
    if skip and set(skip_list.checked_skip_list(skip)) - set(config.llm_int8_skip_modules or ()):
        LOGGER.warning(
            "llm_int8_skip_modules=%r has no effect: this checkpoint is already quantized, and decides which layers are quantized. "
            "To have other layers in floating point, quantize the original model with that list.",
            list(skip),
        )
    return config
