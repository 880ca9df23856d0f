"""``MatMul8bitLt: inputs will be cast from torch.bfloat16 to float16`` is logged at every call."""

from __future__ import annotations

import functools
import logging

from ....engine import Finding, Message, Patch, Rewrite
from ...reproducers.log_records import record_logs

LOGGER = logging.getLogger("bitsandbytes.autograd._functions")


@functools.cache
def _say_once(message: str, dtype: object) -> None:
    LOGGER.warning(message, dtype, stacklevel=2)


def defect() -> Finding:
    """Run five forwards in another dtype than float16."""
    import bitsandbytes as bnb
    import torch

    with record_logs(LOGGER) as records:
        layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu").eval()
        for _ in range(5):
            layer(torch.ones(2, 64))
    return Finding(len(records) > 1, f"{len(records)} messages in 5 calls")


PATCH = Patch(
    id="bitsandbytes-int8-cast-message",
    summary="'inputs will be cast' is logged at every INT8 call",
    groups=("layers", "train"),
    messages=(
        Message(
            "MatMul8bitLt: inputs will be cast from torch.bfloat16 to float16 during quantization",
            "bitsandbytes/autograd/_functions.py",
            parts=("MatMul8bitLt: inputs will be cast from",),
        ),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        0.50.0 replaced ``warnings.warn``, which Python shows once for each place, by ``logger.warning``, which logs
        every time: 20 lines for 20 calls, and 224 lines a step for a model of 32 layers.
    """,
    repair="""
        The repair logs it once for each dtype, to the same logger.
    """,
    requires=("bitsandbytes>=0.50",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            "bitsandbytes.autograd._functions:MatMul8bitLt.forward",
            "logger.warning",
            "_patches_say_once",
            names={"_patches_say_once": _say_once},
        ),
    ),
    defect=defect,
)
