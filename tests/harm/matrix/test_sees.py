"""The matrix sees: a fix is taken out of a helper, and trials get worse that do not with it.

A9, a merge that is an error with the plugin and without, is taken out in ``tests/repairs/peft/test_tied_quantized_head.py``.
A10 has none: it is the time of a merge, and no number or error becomes another. ``benchmarks/merges`` measures it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

import pytest

from patches.engine.gate import satisfied

from . import running
from .judge import ERROR, RIGHT, SPOILT, WRONG, Outcome, fault
from .trials import Trial

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="trials run in forks of one process")


def behaves(path: str, source: str) -> Callable[[], None]:
    """The function at ``path`` is given the body of the function ``old`` in ``source``, wherever it is held already."""

    def take_out() -> None:
        module, _, name = path.partition(":")
        names = vars(import_module(module))
        target: Any = import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        local: dict[str, Any] = {}
        exec(source, names, local)
        assert isinstance(target, FunctionType) and not local["old"].__code__.co_freevars
        target.__code__ = local["old"].__code__

    return take_out


def both(*parts: Callable[[], None]) -> Callable[[], None]:
    def take_out() -> None:
        for part in parts:
            part()

    return take_out


def without_edits(module: str, ending: str) -> Callable[[], None]:
    """The patch in ``module`` loses the edits whose targets end so."""

    def take_out() -> None:
        patch = import_module(module).PATCH
        for part in patch.parts:
            object.__setattr__(part, "edits", tuple(edit for edit in part.edits if not edit.target.endswith(ending)))
        assert sum(len(part.edits) for part in patch.parts) < len(patch.edits)

    return take_out


TAKEN_OUT = {
    "A1: the weight keeps scales of its own after a forward": (
        both(
            behaves("patches.quantized.int8.scale_ownership:record_first_forward", """
def old(layer):
    weight = layer._parameters.get("weight")
    if weight is not None and layer.state.CB is not None:
        vars(weight)["SCB"] = layer.state.SCB
"""),
            behaves("patches.quantized.int8.scale_ownership:check_weight_matches_state", """
def old(layer):
    return None
"""),
        ),
        ["int8: ran + scales_replaced + state_dict", "int8: ran + scales_equalized + offload_to_cpu",
         "int8: trained + rows_permuted + loaded"],
    ),
    "A2: any codes are read with the scales of the layer": (
        behaves("patches.quantized.int8.plain_weights:find_scale_of_plain", """
def old(layer, codes):
    return scale_ownership.original_weight_and_scales(layer)[1]
"""),
        ["int8: ran + call_with_detached + forward", "int8: ran + weight_plain_codes + forward"],
    ),
    "A2: codes as floating point numbers are taken for weights": (
        behaves("patches.quantized.int8.plain_weights:refuse_packed_values", """
def old(layer, weight):
    return None
"""),
        ["int8: ran + weight_codes_as_float + forward", "int8: ran + call_with_codes_as_floats + forward"],
    ),
    "A3: packed bits that were cast are loaded": (
        behaves("patches.quantized.four_bit.quant_state_dict:refuse_cast", """
def old(name, codes):
    return None
"""),
        ["nf4-stored-bf16: ran + loads_in_half + forward", "nf4-stored-f16: cold + loads_in_bf16 + state_dict"],
    ),
    "A4: a new weight is loaded under the scales of the old": (
        both(
            behaves("patches.repairs.bitsandbytes.int8.weights_without_scales:_not_quantized", """
def old(layer, weight, local_metadata):
    return False
"""),
            behaves("patches.repairs.bitsandbytes.int8.load_state_dict:_scale_to_fill", """
def old(layer):
    return layer.state.SCB
"""),
        ),
        ["int8: ran + loads_into_fresh + forward", "int8-bias: ran + loads_into_fresh_not_strictly + state_dict"],
    ),
    "A5: what was dequantized in place counts as packed": (
        behaves("patches.quantized.four_bit.quant_states:is_packed", """
def old(weight):
    return is_marked_quantized(weight)
"""),
        ["nf4: ran + class_of_plain_layer + half", "nf4: cold + forward_of_its_own + bfloat16"],
    ),
    "A6: statistics are rounded to the default dtype": (
        behaves("patches.quantized.four_bit.quant_state_dict:_as_saved", """
def old(weight, key, tensor, nested):
    import torch
    return tensor.to(torch.get_default_dtype()) if key and tensor.is_floating_point() else tensor
"""),
        ["nf4: cold + loads_on_meta + state_dict", "nf4-nested: cold + loads_on_meta + state_dict"],
    ),
    "A7: backward through offloaded adapters is an error": (
        behaves("patches.offload.lost_gradients:_record_loss", """
def old(layer, gradient):
    raise RuntimeError("these adapters are offloaded")
"""),
        ["float: lora + on_cpu + backward"],
    ),
    "A8: a copy of an embedding is not registered": (
        without_edits("patches.repairs.bitsandbytes.optimizers.overrides", ".__setstate__"),
        ["stable: trained_by_adam8bit + copied + steps_of_adam8bit"],
    ),
    "A11: the device of a model is a torch.device": (
        behaves("patches.repairs.peft.adapters_on_meta:device_of", """
def old(model):
    there = offloaded_modules.first_execution_device(model) if model.device.type == "meta" else None
    return model.device if there is None else there
"""),
        ["float: cold + prompt_tuning", "nf4: ran + prompt_tuning"],
    ),
    "contents decide: what was dequantized in place is moved as codes": (
        behaves("patches.quantized.weights.dequantized_in_place:parameter_to_move", """
def old(module, name):
    return getattr(module, name)
"""),
        ["int8-bias: pickled + forward_of_its_own + offload_to_disk",
         "int8-threshold-bias: saved_whole + class_of_plain_layer + offload_to_cpu"],
    ),
    "contents decide: numbers are dequantized": (
        behaves("patches.quantized.weights.dequantized_in_place:holds_floats", """
def old(weight):
    return False
"""),
        ["nf4-bias: pickled + forward_of_its_own + dequantize_by_peft",
         "int8-float: ran + weight_copied_shallowly + dequantize_by_peft"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    running.prepare()


STAND_INS = {
    "A7": "test_adapters_offloaded.py runs backward through offloaded adapters",
    "A8": "test_override_outlives_model.py trains copies of embeddings",
    "A11": "test_prompt_encoder_on_meta.py tunes models whose device is a word or None",
}


def on_its_day(what: str) -> Any:
    stand_in = STAND_INS.get(what.partition(":")[0])
    return pytest.param(what, marks=pytest.mark.release(stand_in) if stand_in else ())


@pytest.mark.parametrize("what", map(on_its_day, TAKEN_OUT))
def test_a_fix_that_is_taken_out_is_seen(what: str) -> None:
    without, names = TAKEN_OUT[what]
    if what.startswith("A8:") and not satisfied("bitsandbytes>=0.50"):
        pytest.skip("before 0.50 no optimizer of bitsandbytes steps on a CPU")
    chosen = [Trial.parse(name) for name in names]
    before = running.as_is(chosen)
    assert not running.worse(before, running.patched(chosen))
    assert running.worse(before, running.patched(chosen, without=without)), "nothing gets worse: the matrix is blind"


def test_what_only_runs_patched_is_judged_by_its_numbers() -> None:
    right, wrong, spoilt = Outcome(RIGHT), Outcome(WRONG), Outcome(SPOILT, "loads: RuntimeError: keys")
    assert not fault(None, (right,)) and fault(None, (right, wrong))
    assert fault((Outcome(ERROR, "ran: RuntimeError"),), (spoilt,)).startswith("the error changes the layer")


def test_an_error_that_changes_the_layer_as_is_too_is_not_worse_where_the_library_comes_to_it() -> None:
    """As is the copy to meta raises an error; without it, loading leaves the layer changed with the plugin and without."""
    name = "nf4: moved_to_meta_and_back + weight_plain_own_codes + loads_assigning_one_that_ran + forward"
    chosen = [Trial.parse(name)]
    before = running.as_is(chosen)
    after = running.patched(chosen)
    assert fault(before[chosen[0]], after[chosen[0]]) and not running.worse(before, after)
