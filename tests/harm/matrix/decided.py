"""Trials that are worse and stay, each with its reason: by what they say, or by their names."""

from __future__ import annotations

import re

from .trials import Trial

BY_MESSAGE = {
    "holds two different packed INT8 weights": (
        "codes were replaced in one of two places after a forward, and nothing tells which is newer (docs/state.md)"
    ),
}

BY_NAME = {
    r"^(nf4|fp4).*(pickled|saved_whole|copied_shallowly|cast_).* codebook_(replaced|cut|flipped) |"
    r"^(nf4|fp4)-(nested-)?stored.* codebook_(replaced|cut|flipped) .*cast_|"
    r"^(nf4|fp4).* (loads_another_storage|weight_data_float .*loads_\w+) .*codebook_(replaced|cut|flipped) ": (
        "bitsandbytes' kernels ignore a code book that differs from the quant type's, with the plugin and without; as is, an "
        "error hides it: a pickled or copied weight is no Params4bit, a cast destroys packed weights, and those of another "
        "storage, or for a weight that was dequantized in place, are not loaded"
    ),
    r"^(nf4|fp4).* absmax_cut ": (
        "bitsandbytes' kernels read beyond the end of an absmax that was cut, with the plugin and without; as is, a state dict "
        "that is not loaded ends in an error before"
    ),
    r"^int8.* weight_buffer .*weight_deleted .*loaded_not_strictly": (
        "a weight that is a plain attribute, no parameter and no buffer, is not saved, and its scales are, with the plugin and "
        "without; as is, bitsandbytes before 0.50 raises an error when it saves"
    ),
    r"^(nf4|fp4)-(nested-)?stored.*evaluated \+ (.* \+ )?call_with_(plain|detached)": (
        "functional_call puts the packed weights of another layer where nothing notices: they are read with the layer's own "
        "statistics, with the plugin and without; as is, the assertion of the repacking on AVX512-BF16 comes first"
    ),
    r"^(nf4|fp4).*: (.* )?(on_cpu|on_cpu_ran|on_disk) .*(saved_by_torch|state_dict\w*)$": (
        "the weight of an offloaded layer is read as a tensor on meta, as with nn.Linear: that is no number"
    ),
    r"^(nf4|fp4).* codebook_none ": (
        "bitsandbytes' kernels ignore the code book, with the plugin and without; as is, DoRA replaces the weight in each forward, "
        "which is an error without a code book"
    ),
    r"^(stable|embedding).* moved_to_meta | moved_to_meta .*(dequantize_by_peft|state_dict|saved_by_torch)": (
        "a weight on meta is read as a tensor on meta, as with nn.Embedding and nn.Linear: that is no number"
    ),
    r"^int8-float.*(parametrized_floats|pruned) .*merge": (
        "peft loses a merge into a parametrized weight, as it does with nn.Linear; as is, the forward raises an error"
    ),
    r"^int8.* codes_of_state_none ": (
        "as is, codes that state.CB lost are quantized again (800 times too large); the error comes after bitsandbytes' "
        "reset_grads, which drops the scales of the state"
    ),
    r"^(int8|nf4|fp4).*(pickled|saved_whole|saved_and_loaded_whole).*_(swapping|overwriting) ": (
        "torch refuses to swap or overwrite an Int8Params or a Params4bit, with the plugin and without; as is, a pickled weight "
        "is none, because it has lost its class"
    ),
    r"^(nf4|fp4).* weight_fresh .*class_of_plain_layer .*(pickled|saved_whole|saved_and_loaded_whole).*dora": (
        "peft dequantizes a Params4bit in a plain layer, also one that was never quantized, which is an error with the plugin "
        "and without; as is, a pickled weight is none, because it has lost its class"
    ),
    r"^(nf4|fp4)-(nested-)?stored.* cast_half_(swapping|overwriting) ": (
        "torch refuses to swap or overwrite a Params4bit, with the plugin and without; as is, a cast destroys packed weights that "
        "are stored in floating point, and what it makes is swapped"
    ),
    r"^own-.*(pickled|saved_whole|saved_and_loaded_whole).* moved_to_meta_and_back ": (
        "torch refuses to move an Int8Params or a Params4bit in a user's module to meta, with the plugin and without; as is, a "
        "pickled weight is none, because it has lost its class"
    ),
    r"^int8.* forward_of_its_own .*loads_assigning ": (
        "the forward that a user gave a layer reads the weight as values, and a state dict brings packed ones: as is, loading "
        "it without assign=True is wrong in the same way, and with it an error"
    ),
    r"^int8.*(pickled|saved_whole|saved_and_loaded_whole).* packed_cut ": (
        "bitsandbytes' kernels read beyond the end of packed weights that were cut, with the plugin and without; as is, a "
        "pickled weight is no Int8Params, because it has lost its class"
    ),
    r"^int8.* parametrized_floats .*streamed_into_state ": (
        "a parametrized layer computes with the floating-point weight that it has, so nothing reads packed weights that a "
        "program puts into its state; as is, a parametrized weight is an error"
    ),
    r"^int8.* parametrized_floats .*class_of_plain_layer .*loads_assigning ": (
        "torch loads the weight of an nn.Linear before it raises the error about the other keys, with the plugin and without; "
        "as is, an error comes before"
    ),
    r"^(nf4|fp4).* forward_of_its_own .*copied .*loads": (
        "the forward that a user gave a layer reads the weight of that layer also in a copy; as is, packed weights are not loaded "
        "over a weight that was dequantized in place, which is an error"
    ),
    r"^(nf4|fp4).* (evaluated|loads_another_storage) .*pruned ": (
        "pruning multiplies packed weights that are stored in floating point by its mask, which changes those that look like NaN, "
        "with the plugin and without; as is, packed weights of another storage are not loaded, which is an error, and the "
        "assertion of the repacking on AVX512-BF16 comes first"
    ),
    r"^int8.* weight_data_cast .*(emptied_and_loaded|loads_own( |$))": (
        "packed weights are not loaded into a weight in floating point; as is, they are copied there, and the forward computes with "
        "those that the weight has beside, which is right only where both are the same"
    ),
    r"^(nf4|fp4).* statistics_inference .*compile_backward$": (
        "torch saves no tensor that was made in inference mode for backward, and says so: with the plugin the statistics are saved "
        "with the weight, for which it is the same error as is; whether a tensor is one, Dynamo cannot ask without a graph break"
    ),
    r"^int8.* (weight_made_in_inference_mode|scales_inference) .*compile_backward$": (
        "torch saves no tensor that was made in inference mode for backward, and says so (seen on bitsandbytes 0.46): with the "
        "plugin packed weights and scales are saved for it, as autograd's rules ask; whether a tensor is one, Dynamo cannot ask without a graph break"
    ),
    r"^(nf4|fp4).*computed-None.* default_dtype_double .*merge": (
        "peft makes adapters in the compute dtype of a layer, or in torch's default dtype where it has none, and float64 is not "
        "quantized; as is, the first forward writes the dtype of its input into the layer"
    ),
    r"^(nf4|fp4).* (class_of_plain_layer .*weight_copied_shallowly|weight_copied_shallowly .*class_of_plain_layer) "
    r".*((moved|cast_with_device) |(to_cpu|to_dtype)$)": (
        "a copied weight belongs to no layer, and nothing tells values that were written into it from those that accelerate "
        "offloaded before they were quantized, which bitsandbytes-params4bit-meta quantizes when they are moved"
    ),
    r"^int8.*loads_assigning.* weight_data_cast .*state_dict": (
        "packed weights that were cast in place are saved as they are, with the plugin and without; as is, the state dict "
        "before is not loaded, which is an error"
    ),
    r"^int8.*(pickled|saved_whole).* scales_on_meta .*compile_": (
        "bitsandbytes 0.46 computes numbers without meaning with row scales on meta in a compiled graph, with the plugin and "
        "without; as is, a pickled weight is no Int8Params, and the kernel of its forward raises an error"
    ),
    r"^int8.*(pickled|saved_whole).* (weight_data_cast|codes_of_state_replaced) .*(to_cpu|to_dtype|half|bfloat16)$": (
        "a layer that was not pickled does the same with the plugin and without: bitsandbytes quantizes packed weights that were "
        "cast when they are moved (with the plugin an error), and knows no scales of a weight that differs from its state; as "
        "is, a pickled weight is no Int8Params, because it has lost its class"
    ),
    r"^int8.* scales_on_meta .*dequantize_by_transformers": (
        "bitsandbytes dequantizes into uninitialized memory with row scales on meta, with the plugin and without: what that holds "
        "is chance, at times the right values"
    ),
    r"^int8.* scales_(half|bf16) .*from_meta .*weight_data_float ": (
        "values written into weight.data before the first forward, which reads weight.CB (docs/state.md), with the plugin and "
        "without; as is, bitsandbytes 0.46 loads no layer that was made on meta"
    ),
    r"^int8.* scales_(half|bf16|double) .*loads_floats": (
        "bitsandbytes-int8-weights-without-scales refuses floating-point values for packed INT8 weights, because bitsandbytes "
        "truncates them to whole numbers, silently; the kernels of 0.46, which take row scales in float32 alone, raise an error "
        "in the next forward"
    ),
    r"^int8.* scales_(half|bf16|double) .*moved.* loads": (
        "the kernels of bitsandbytes 0.46 take no row scales in half precision, with the plugin and without; as is, a move "
        "quantizes the packed weights once more, with new scales, and the state dict is loaded over these"
    ),
    r"^int8.* scales_cut .*(moved|cast_with_device).* loads": (
        "a state dict is not loaded over row scales of another shape, with the plugin and without; as is, a move in bitsandbytes "
        "0.46 quantizes the packed weights once more, with new scales, and the state dict is loaded over these"
    ),
    r"^(nf4|fp4).* class_(and_parameter_)?of_plain_layer .*weight_(made_in_inference_mode|of_another).* safetensors": (
        "a packed weight in an nn.Linear is saved as it is, with the plugin and without; as is, a forward on AVX512-BF16 has "
        "repacked the weight before, and nothing is right from there on"
    ),
    r"^int8.* loads_without_scales_not_strictly .*scales_(of_another|one_for_all)": (
        "packed weights that were loaded with strict=False and without their scales have none until they come: a program that "
        "writes them in place finds None. Assign a tensor, or load them"
    ),
    r"^int8.*(pickled|saved_whole).* forward_of_its_own .*(to_cpu|half|bfloat16)$": (
        "bitsandbytes quantizes floats in a Linear8bitLt when it is moved, also under a forward of the user's, which may read "
        "packed weights; as is, a pickled weight is no Int8Params, because it has lost its class"
    ),
    r"^(nf4|fp4).* absmax_on_meta ": (
        "bitsandbytes 0.49 and 0.50 compute NaN with an absmax on meta, with the plugin and without; as is, several rows after an "
        "evaluation (0.49), and DoRA, which replaces the weight in each forward, raise an error first"
    ),
}


def reason(trial: Trial, why: str) -> str:
    """Why this trial may be worse; empty if it may not."""
    by_message = (because for words, because in BY_MESSAGE.items() if words in why)
    by_name = (because for pattern, because in BY_NAME.items() if re.search(pattern, str(trial)))
    return next(iter((*by_message, *by_name, "")))
