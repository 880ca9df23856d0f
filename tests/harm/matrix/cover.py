"""The fewest trials in which each layer meets each change, and each change each reader.

A trial is a layer in a state, a change, one or more readers that may follow each other, and a last one. Which of them go
together says :func:`makes_sense`; ``test_matrix.py`` looks at what the trials did, so that a pair counts only if it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

from .changes import CHANGES
from .readers import READERS
from .states import STATES
from .subject import KINDS

LAYERS = ("int8", "int8-threshold-bias", "int8-float", "nf4", "nf4-nested", "nf4-bias", "embedding4", "embedding8", "own-int8",
          "own-nf4", "own-nf4-nested", "float", "stable")  # fmt: skip
"""One of each family, and the options that changes are about: what ``make check`` runs them with."""
DAILY = tuple(name for name in STATES if name != "compiled")
MORE = 2
"""How many readers a trial has before its last, where a change has more readers than kinds of layers."""
QUICK = tuple(name for name, reader in READERS.items() if not reader.slow)

_OFFLOADED = ("on_cpu", "on_cpu_ran", "on_disk")
_ADAPTED = ("lora", "lora_ran", "dora", "merged")
_ADAPTING = (
    "lora_gradients",
    "dora_gradients",
    "merge",
    "merge_and_unmerge",
    "merge_and_unload",
    "merge_dora",
    "unmerge",
)
_OF_LAYERS_THAT_MULTIPLY = ("trained", *_ADAPTED, "merged_and_unloaded", *_ADAPTING, "forward_bf16", "backward",
                            "backward_checkpointed", "offload_and_train", "dequantize_by_peft",
                            "dequantize_by_transformers", "prompt_tuning")  # fmt: skip
_WITH_OTHER_PARAMETERS = ("forward", "forward_eval", "forward_one_row", "forward_twice", "forward_bf16", "forward_autocast",
                          "forward_inference", "backward", "backward_checkpointed", "brought_back")  # fmt: skip
"""The readers of a call that brings its own weight."""
_NO_PARAMETER = ("pruned", "parametrized", "cast_half", "cast_half_swapping", "cast_half_overwriting", "cast_bfloat16",
                 "cast_double", "cast_with_device", "loads_in_half_assigning", "weight_none")  # fmt: skip
"""After these the weight is no parameter in float32, which optimizers train."""
_OF_WHAT_IS_IN_MEMORY = ("half", "bfloat16", "to_dtype", "to_cpu", "weight_to_cpu", "offload_to_cpu", "offload_to_disk",
                         "offload_and_train", "dispatch", "dequantize_by_peft", "dequantize_by_transformers", "deepcopy",
                         "pickle_whole", "save_whole")  # fmt: skip
_OF_AN_OWN_LAYER = ("dispatch", "half", "bfloat16", "to_dtype", "loaded", "loaded_into_one_that_ran", "loaded_before_quantized",
                    "loaded_by_assigning", "loaded_not_strictly", "state_dict_by_torch_distributed", "prompt_tuning",
                    "dequantize_by_transformers")  # fmt: skip
"""The readers that look at no layer under an adapter."""


_RAN = ("ran", "trained", "evaluated", "inferred", "copied", "pickled", "lora_ran")
_NEEDS: dict[str, Callable[[str, str], bool]] = {
    "bias_in_place": lambda kind, state: "bias" in kind,
    "offset_replaced": lambda kind, state: "nested" in kind,
    "offset_none": lambda kind, state: "nested" in kind,
    "codes_of_state_replaced": lambda kind, state: state in _RAN,
    "streamed_into_all": lambda kind, state: state in _RAN,
    "streamed_into_state": lambda kind, state: state in _RAN,
    "settled_by_hand": lambda kind, state: state in ("cold", "from_meta", "lora", "dora"),
    "shape_attributes": lambda kind, state: "bias" not in kind and state not in _ADAPTED,
    "call_stacked": lambda kind, state: state != "tied",
    "loads_on_meta": lambda kind, state: state not in (*_ADAPTED, "tied"),
}
"""What a change needs of kind and state."""


def meant(kind: str, change: str) -> bool:
    """Whether the change is about layers of this kind, in some state."""
    fits = _NEEDS.get(change, lambda kind, state: True)
    return KINDS[kind].family in CHANGES[change].families and any(fits(kind, state) for state in DAILY)


def makes_sense(kind: str, state: str, change: str, *readers: str) -> bool:
    """Whether the library has these steps in this order; rules only, so a trial may still turn out to have none."""
    named = {state, *readers}
    return _NEEDS.get(change, lambda kind, state: True)(kind, state) and not (
        (KINDS[kind].embeds and named & {*_OF_LAYERS_THAT_MULTIPLY})
        or (state in _OFFLOADED and not CHANGES[change].offloaded)
        or (state in _ADAPTED and change.startswith(("call_", "parametrized", "pruned")))
        or any(not _is_read(kind, state, change, reader) for reader in readers)
    )


def _is_read(kind: str, state: str, change: str, reader: str) -> bool:
    if (change, reader) in (("default_device_meta", "loaded_before_quantized"), ("pruned", "loaded_not_strictly")):
        return False
    if reader == "dequantize_by_transformers" and KINDS[kind].bits == 32:
        return False
    if state in _OFFLOADED and reader in _OF_WHAT_IS_IN_MEMORY:
        return False
    if change.startswith("parametrized") and reader.startswith("loaded"):  # whose keys are others
        return False
    if reader in ("lora_gradients", "dora_gradients") and state in _ADAPTED:
        return state.startswith(reader.removesuffix("_gradients"))
    if change.startswith("call_") and reader not in _WITH_OTHER_PARAMETERS:
        return False
    if reader == "steps_of_adam8bit" and (KINDS[kind].family != "stable" or change in _NO_PARAMETER):
        return False
    if reader in ("forward_tied", "brought_back", "unmerge"):
        return state == {"forward_tied": "tied", "brought_back": "on_cpu_ran", "unmerge": "merged"}[reader]
    if state in _ADAPTED:
        return reader not in _OF_AN_OWN_LAYER and (reader not in _ADAPTING or state != "merged")
    return not (
        state == "tied" and reader in (*_ADAPTING, "state_dict_by_torch_distributed", "dequantize_by_transformers")
    )


@cache
def cover(layers: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The kind and the steps of each trial."""
    return tuple(_cover(layers))


def _cover(layers: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for number, change in enumerate(CHANGES):
        kinds = [kind for kind in layers if meant(kind, change)]
        left = [*QUICK[number % len(QUICK) :], *QUICK[: number % len(QUICK)]]
        turn = idle = 0
        while turn < len(kinds) or (left and idle < len(kinds)):
            kind = kinds[turn % len(kinds)]
            fit = [state for state in DAILY if makes_sense(kind, state, change)]
            first = (7 * turn + number) % len(fit)
            states = [*fit[first:], *fit[:first]]
            state, readers = _next(kind, states, change, left, 0 if len(left) <= len(kinds) - turn else MORE)
            idle = 0 if readers else idle + 1
            if readers or turn < len(kinds):
                yield kind, (state, change, *(readers or ["forward"]))
            left = [reader for reader in left if reader not in readers]
            turn += 1


def _next(kind: str, states: Sequence[str], change: str, left: Sequence[str], more: int) -> tuple[str, list[str]]:
    """The first state in which one of the readers that are left makes sense: it, after up to ``more`` that end nothing."""
    for state in states:
        fit = [reader for reader in left if makes_sense(kind, state, change, reader)]
        if fit:
            end = next((reader for reader in fit if READERS[reader].last), fit[-1])
            between = [reader for reader in fit if not READERS[reader].last and reader != end]
            return state, [*between[:more], end]
    return next(state for state in states if makes_sense(kind, state, change, "forward")), []
