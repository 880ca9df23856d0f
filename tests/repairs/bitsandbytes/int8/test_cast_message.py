"""What ``MatMul8bitLt`` says of a cast of its inputs is said once for each dtype, and is said."""

from __future__ import annotations

import logging

import pytest
import torch
from bitsandbytes.nn import Linear8bitLt

import patches
from patches.engine import gate
from patches.repairs.bitsandbytes.int8 import cast_message

ID = "bitsandbytes-int8-cast-message"
LOGGER = logging.getLogger("bitsandbytes.autograd._functions")
pytestmark = pytest.mark.skipif(
    not gate.satisfied("bitsandbytes>=0.50"), reason="before 0.50 it is a warning, which Python shows once"
)


def test_it_is_said_once_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(LOGGER, "handlers", [handler])
    monkeypatch.setattr(LOGGER, "level", logging.WARNING)
    cast_message._say_once.cache_clear()
    layer = Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu").eval()
    with patches.applied(ID):
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float16):
            for _ in range(2):
                layer(torch.ones(2, 64, dtype=dtype))
    assert ["float32" in said[0], "bfloat16" in said[1], len(said)] == [True, True, 2]
    assert all("inputs will be cast" in message for message in said)
