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
    r"^nf4.*(pickled|copied_shallowly).* codebook_replaced .*": (
        "bitsandbytes' kernels ignore a code book that differs from the quant type's, with the plugin and without; as is, "
        "an earlier error hides it: a pickled or copied weight is no Params4bit"
    ),
    r"^(nf4|fp4).*forward_of_its_own \+ (saved_by_torch|state_dict|safetensors)$": (
        "statistics are saved beside a weight that was dequantized in place, with the plugin and without; as is, the "
        "assertion of the repacking on AVX512-BF16 comes first"
    ),
    r"^(nf4|fp4).*evaluated \+ (.* \+ )?packed_lying": (
        "packed weights laid in one row raise an error in training; as is, an evaluation on AVX512-BF16 lays them anew, and "
        "the gradient of the input is wrong, silently"
    ),
    r"^int8.*weight_fresh .*tied ": (
        "as is, a head that is tied to a weight which a forward quantized quantizes its codes again, which no trial looks at"
    ),
    r"^int8-float.*parametrized_floats .*merge": (
        "peft loses a merge into a parametrized weight, as it does with nn.Linear; as is, the forward raises an error"
    ),
    r"^int8.*weight_plain_own_codes.* codes_replaced": (
        "codes were replaced in one of two places after a forward, and nothing tells which is newer (docs/state.md)"
    ),
    r"^int8.*loads_partly": (
        "bitsandbytes-int8-codes-without-scales refuses codes that come in one load_state_dict(strict=False) and their "
        "scales in the next, because without the second the layer computes wrong numbers silently"
    ),
}


def reason(trial: Trial, why: str) -> str:
    """Why this trial may be worse; empty if it may not."""
    by_message = (because for words, because in BY_MESSAGE.items() if words in why)
    by_name = (because for pattern, because in BY_NAME.items() if re.search(pattern, str(trial)))
    return next(iter((*by_message, *by_name, "")))
