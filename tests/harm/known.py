"""The programs that the patches of today fail, and the fault that each shows.

C1 to C17 are those of FINDINGS, section C; N1 to N8 were found by the catalogue and are told at :data:`FOUND`.

An entry is the id of a program, with its kind of layer or without (then all kinds), as pytest and
``python -m tests.harm`` print it, and the fault; ``" on "`` names the releases where it shows, as PEP 508
requirements. ``@avx512bf16`` ends the id of a program on a processor that repacks 4-bit weights: it is run by
``test_packed``. ``sequences.OPERATION[KIND]`` and ``aot_cache.after_CACHE[KIND]`` are tests of those two files.

How an entry goes: each is a strict xfail, so a program that no longer fails makes the suite fail (``XPASS(strict)``).
Then delete its line here, and nothing else; where it still fails on some releases, or with some kinds of layer, put
what is left in its place. A fault of :data:`FOUND` whose last entry goes, goes too. An operation that leaves the list
takes part in the random sequences from then on. A name that is no program's, and a fault that no entry has, fail
``test_known_names_programs``. No entry is added for a new patch: its harm is repaired instead.
"""

from __future__ import annotations

import pytest

from patches.engine import gate

FOUND = {
    "N1": "an INT8 layer refuses its very own parameters, also with strict=False, which torch does not hand down",
    "N2": "4-bit statistics in another dtype than they were saved in are taken as they are, and read as garbage",
    "N3": "two losses of one output, each with a backward of its own: torch's error for a graph used twice",
    "N4": "saved-tensor hooks that convert what they are given now get codes and statistics, and break them",
    "N5": "alone, it uncovers a defect that another patch repairs: what was an error is a wrong number",
    "N6": "an INT8 layer pickled with the plugin is wrong without it as soon as it is moved",
    "N7": "bfloat16 inputs of a layer whose compute dtype is float32 are computed in bfloat16",
    "N8": "apply() or revert() between forward and backward: what the one saved, the other does not find",
}

BEFORE_050 = "bitsandbytes<0.50"
OLDEST = "bitsandbytes<0.47"

KNOWN: dict[str, str] = {
    # what torch.export makes of a layer
    "exported.strict[int8]": "C1",
    "exported.strict_cold[int8]": "C1",
    "exported.strict_and_saved[int8]": "C1",
    "exported.strict_cold_and_saved[int8]": "C1",
    "exported.without_operators_of_the_plugin[int8-threshold]": "C1",
    "exported.without_operators_of_the_plugin[nf4-double]": f"C17 on {BEFORE_050}",
    "exported.without_operators_of_the_plugin[nf4-double]@avx512bf16": "C17",
    "exported.strict_and_saved[nf4]": f"C17 on {BEFORE_050}",
    "exported.strict_and_saved[nf4-double]": f"C17 on {BEFORE_050}",
    "exported.strict_cold_and_saved[nf4-double]": f"C17 on {BEFORE_050}",
    "exported.strict_and_saved[nf4]@avx512bf16": "C17 on bitsandbytes>=0.50",
    "exported.strict_and_saved[nf4-double]@avx512bf16": "C17 on bitsandbytes>=0.50",
    # graphs on disk
    "aot_cache.after_older[nf4-double]": "C2",
    "aot_cache.after_older[int8-threshold]": "C2",
    # the packed copy of a weight that was written
    "buffers.data_copy[nf4]@avx512bf16": "C3",
    "buffers.data_copy[nf4-double]@avx512bf16": "C3",
    "buffers.data_copy[nf4-bf16]@avx512bf16": "C3",
    "buffers.copy_in_inference_mode[nf4]@avx512bf16": "C3",
    "buffers.copy_in_inference_mode[nf4-double]@avx512bf16": "C3",
    "buffers.written_by_numpy[nf4]@avx512bf16": "C3",
    "buffers.written_by_numpy[nf4-double]@avx512bf16": "C3",
    "buffers.scales_multiplied[nf4]@avx512bf16": "C3",
    "buffers.scales_multiplied[nf4-double]@avx512bf16": "C3",
    "buffers.a_few_codes_by_numpy[nf4]@avx512bf16": "C3",
    "buffers.a_few_codes_by_numpy[nf4-double]@avx512bf16": "C3",
    "buffers.random_codes[nf4]@avx512bf16": "C3",
    "buffers.random_codes[nf4-double]@avx512bf16": "C3",
    # the codes of an INT8 weight that trains
    "buffers.averaged_weights_for_evaluation": "C4",
    "buffers.training_weights_written_by_numpy": "C4",
    # its own parameters
    "state_dicts.its_own_parameters[nf4]": "C5",
    "state_dicts.its_own_parameters[nf4-double]": "C5",
    "state_dicts.its_own_parameters_not_strict[nf4]": "C5",
    "state_dicts.its_own_parameters_not_strict[nf4-double]": "C5",
    "state_dicts.its_own_parameters_in_a_model[nf4]": "C5",
    "state_dicts.its_own_parameters_in_a_model[nf4-double]": "C5",
    "state_dicts.its_own_parameters_themselves[nf4]": "C5",
    "state_dicts.its_own_parameters_themselves[nf4-double]": "C5",
    "state_dicts.its_own_parameters_themselves[int8]": "N1",
    "state_dicts.the_statistics_in_another_dtype[nf4-double]": "N2",
    "sequences.load_its_own_parameters[nf4]": "C5",
    "sequences.load_its_own_parameters[nf4-double]": "C5",
    # inference mode
    "gradients.of_a_layer_made_in_inference_mode[int8]": "C6",
    "gradients.of_a_layer_made_in_inference_mode_in_eval[int8]": "C6",
    # casts by hand
    "casts.codes_in_a_wider_type": "C7",
    "casts.codes_by_type": "C7",
    "casts.statistics_of_the_codes[nf4]": "C7",
    "casts.statistics_of_the_codes[nf4-double]": "C7",
    "casts.like_another_tensor[nf4]": "C7",
    "casts.like_another_tensor[nf4-double]": "C7",
    "casts.device_and_dtype_at_once[nf4]": "C7",
    "casts.device_and_dtype_at_once[nf4-double]": "C7",
    "sequences.look_at_the_codes[nf4]": "C7",
    "sequences.look_at_the_codes[nf4-double]": "C7",
    # files
    "files.named_parameters[int8]": "C8",
    "files.a_list_of_parameters[int8]": "C8",
    "files.one_parameter[int8]": "C8",
    "files.a_state_dict_with_variables[int8]": "C8",
    "files.float_parameters[int8]": "C8",
    "files.float_parameters[int8-fp16]": "C8",
    "files.the_old_file_format[int8]": "C8",
    "files.a_parameter_of_a_batch[int8]": "C8",
    "sequences.save_parameters_and_load[int8]": "C8",
    "files.a_whole_layer_then_moved[int8]": f"N6 on {OLDEST}",
    "copies.a_layer_pickled[int8]": f"N5 on {OLDEST}",
    # subclasses
    "subclasses.a_4bit_parameter_with_a_keyword_pickled": "C9",
    "subclasses.an_int8_parameter_with_an_argument": "C9",
    "subclasses.an_int8_parameter_with_an_argument_pickled": "C9",
    "subclasses.an_int8_parameter_with_an_argument_cut": "C9",
    # pieces
    "pieces.half_of_a_weight_saved": "C10",
    "pieces.gradients_of_pieces_of_a_float_weight": "C10",
    # what autograd keeps
    "hooks.what_saved_tensor_hooks_hold": "C11",
    "hooks.products_of_a_checkpointed_step": "C11",
    "hooks.activations_compressed[nf4]": "N4",
    "hooks.activations_compressed[nf4-double]": "N4",
    "gradients.two_losses_of_one_output": "N3",
    "gradients.two_losses_of_one_output_in_eval": "N3",
    "reverted.a_backward_that_is_pending": "N8",
    # the packed copy: how often, and how long
    "modes.repacked_once_by_a_training_run": "C12",
    "modes.repacked_where_it_pays": "C12",
    "sharing.views_of_one_storage_repacked_once": "C12",
    "offload.repacked_from_the_disk": "C12",
    "sharing.freed_with_codes_and_scales_in_one_storage[nf4]@avx512bf16": "C13",
    "compiled.inference_of_an_unbacked_batch[nf4-double]@avx512bf16": "C14 on bitsandbytes>=0.50",
    "compiled.inference_of_an_unbacked_batch[nf4-bf16]@avx512bf16": "C14 on bitsandbytes>=0.50",
    # offload
    "offload.not_quantized_before_it_is_offloaded_and_odd": "C15 on bitsandbytes>=0.50",
    "offload.not_quantized_before_it_is_offloaded_in_eval[nf4]@avx512bf16": "C15",
    "offload.not_quantized_before_it_is_offloaded_in_eval[nf4-double]@avx512bf16": "C15",
    "offload.to_the_cpu[nf4]@avx512bf16": "N5",
    "offload.to_the_cpu[nf4-double]@avx512bf16": "N5",
    "offload.to_the_disk[nf4]@avx512bf16": "N5",
    "offload.to_the_disk[nf4-double]@avx512bf16": "N5",
    "offload.dispatched_over_cpu_and_disk[int8]": f"N5 on {OLDEST}",
    "state_dicts.assigned_to_a_layer_on_meta[int8]": f"N5 on {OLDEST}",
    # widths
    "inputs.columns_that_fill_no_block_in_eval[nf4]@avx512bf16": "C16",
    "inputs.columns_that_fill_no_block_in_eval[nf4-double]@avx512bf16": "C16",
    # dtypes
    "gradients.of_inputs_in_half_precision[nf4]": f"N7 on {OLDEST}",
    "inputs.every_dtype[nf4]": f"N7 on {OLDEST}",
}


def fault_of(name: str) -> str:
    """The fault of an entry, without its releases."""
    return KNOWN[name].partition(" on ")[0]


def marks(*names: str) -> list[pytest.MarkDecorator]:
    """The mark of the program that goes by these names, if it is known to fail on this stack."""
    for name in names:
        fault, _, when = KNOWN.get(name, "").partition(" on ")
        if fault and (not when or gate.satisfied(when)):
            reason = f"{fault}: {FOUND[fault]}" if fault in FOUND else fault
            return [pytest.mark.xfail(reason=reason, strict=True)]
    return []
