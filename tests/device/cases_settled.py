"""A call that has settled does on the device what it did without the patches: no copy, wait or kernel more.

Each program runs three times, unpatched and patched, in one process; the third run is counted. What dies without the
patches, such as an offloaded layer, has nothing to be compared with: ``cases_offload.py`` counts what it costs.
"""

from __future__ import annotations

from collections.abc import Callable

import bitsandbytes as bnb
import pytest
import torch

import patches
from patches.engine import gate
from tests.device import watch
from tests.device.layers import CHECKPOINTING, KINDS, inputs, stack, step
from tests.device.models import QUANTIZED, add_lora, batch, half, load

pytestmark = pytest.mark.one_in(4)

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
Program = Callable[[], object]


def settled(make: Callable[[], Program]) -> watch.Events:
    """What the third run of a program does."""
    run = make()
    run(), run()
    with watch.watch() as seen:
        run()
    assert seen.log, "a program that does nothing adds nothing"
    return seen


def added(make: Callable[[], Program]) -> dict[str, int]:
    """What the patches add to the third run; {} if nothing."""
    unpatched = settled(make)
    with patches.applied():
        return settled(make).more_than(unpatched)


def forward(kind: str, device: str, rows: int, of_layer: torch.dtype, of_input: torch.dtype, grad: bool) -> Program:
    """A call of two layers in eval."""
    model, x = stack(kind, device, dtype=of_layer).eval(), inputs(device)[:rows].to(of_input)

    def run() -> torch.Tensor:
        with torch.set_grad_enabled(grad):
            return model(x)

    return run


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_forward(kind, dtype, rows, grad, device):
    assert added(lambda: forward(kind, device, rows, dtype, dtype, grad)) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_of_another_dtype_is_cast_in_each_call(kind, device):
    """The price of leaving it as it is: without the patches the first call wrote it over. Nothing else is added."""
    casts = added(lambda: forward(kind, device, 4, torch.float32, torch.bfloat16, grad=False))
    a_layer = 2 if gate.satisfied("bitsandbytes<0.47") and "nf4" in kind else 1  # there one of them goes unused
    assert set(casts) <= {"kernel aten::copy_"} and sum(casts.values()) <= 2 * a_layer


def test_a_weight_that_may_have_changed_is_quantized_in_each_call(device):
    """``has_fp16_weights`` in evaluation: whether it is another, the device could only tell by making the host wait."""

    def make() -> Program:
        torch.manual_seed(0)
        layer, x = bnb.nn.Linear8bitLt(64, 64, bias=False).half().to(device).eval(), inputs(device).half()
        return torch.no_grad()(lambda: layer(x))

    assert added(make) == {"kernel bitsandbytes::int8_vectorwise_quant": 1}


@pytest.mark.parametrize("checkpointing", ["no", "reentrant"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_step(kind, checkpointing, device):
    """Non-reentrant checkpointing, without the patches, recomputes nothing of such layers and saves no memory."""

    def make() -> Program:
        model, x = stack(kind, device).train(), inputs(device)
        return lambda: step(model, x, CHECKPOINTING[checkpointing])

    assert added(make) == {}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_lora_step(kind, checkpointing, device, llama):
    def make() -> Program:
        model, tokens = add_lora(load(llama, kind, {"": device}), CHECKPOINTING[checkpointing]), batch(device)
        return lambda: model(input_ids=tokens, labels=tokens).loss.backward()

    assert added(make) == {}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_generating_over_two_devices(kind, device, other, llama):
    def make() -> Program:
        model, tokens = load(llama, kind, half(device, other)), batch(device)
        return lambda: model.generate(tokens, max_new_tokens=2, do_sample=False, pad_token_id=0)

    assert added(make) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict(kind, device):
    def make() -> Program:
        model = stack(kind, device)
        return lambda: {name: tensor.cpu() for name, tensor in model.state_dict().items()}

    assert added(make) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_move_to_where_it_is(kind, device):
    def make() -> Program:
        model, x = stack(kind, device), inputs(device)
        return lambda: model.to(device)(x)

    assert added(make) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_codes_travel_once_in_a_move(kind, device):
    """Without the patches the scales of INT8 stay behind, so that the whole cannot be compared."""
    model = stack(kind, device)
    size = model[0].weight.nbytes
    with patches.applied(), watch.watch() as seen:
        model.to("cpu").to(device)
    large = [direction for direction, copied in seen.copies if copied >= size]
    assert large == ["device to host"] * 2 + ["host to device"] * 2
