"""What a user does to a layer, one operation after the other, and the plain layer that it must agree with.

Each operation does the same to a quantized layer and, where it changes numbers, to the weight of an ordinary
``nn.Linear``; after each the two are compared. So any sequence of operations is a program of the catalogue.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from .checks import Check, close, same
from .layers import Quantized, dequantized
from .programs.buffers import statistics

Operation = Callable[[Quantized], Iterator[Check]]
OPERATIONS: dict[str, Operation] = {}


def operation(body: Callable[[Quantized], Iterator[Check] | None]) -> Operation:
    """Put ``body`` among the operations; it may yield checks of its own."""

    def run(q: Quantized) -> Iterator[Check]:
        yield from body(q) or ()

    OPERATIONS[body.__name__] = run
    return run


def sequence(names: Sequence[str]) -> Callable[[Quantized], Iterator[Check]]:
    """The program that does these operations in order and looks at the layer after each."""

    def body(q: Quantized) -> Iterator[Check]:
        for name in names:
            yield from OPERATIONS[name](q)
            with torch.no_grad():
                yield q.right(q.layer(q.x))

    return body


# -- modes and forwards --------------------------------------------------------------------------------


@operation
def train(q: Quantized) -> None:
    q.layer.train()


@operation
def evaluate(q: Quantized) -> None:
    q.layer.eval()


@operation
def infer_in_inference_mode(q: Quantized) -> Iterator[Check]:
    with torch.inference_mode():
        yield q.right(q.layer(q.x))


@operation
def infer_one_row(q: Quantized) -> Iterator[Check]:
    with torch.no_grad():
        yield q.right(q.layer(q.x[:1]), q.x[:1])


@operation
def infer_in_bfloat16(q: Quantized) -> Iterator[Check]:
    with torch.no_grad():
        yield close(q.layer(q.x.bfloat16()).float(), q.expected(), 2e-2)


@operation
def infer_under_autocast(q: Quantized) -> Iterator[Check]:
    with torch.autocast(q.device.type, torch.bfloat16), torch.no_grad():
        yield close(q.layer(q.x).float(), q.expected(), 2e-2)


def step(q: Quantized, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Check]:
    x = q.inputs(grad=True)
    y = forward(x)
    yield q.right(y, x)
    y.sum().backward()
    yield q.gradient(x)


@operation
def take_a_step(q: Quantized) -> Iterator[Check]:
    yield from step(q, q.layer)


@operation
def take_a_checkpointed_step(q: Quantized) -> Iterator[Check]:
    yield from step(q, lambda x: checkpoint(q.layer, x, use_reentrant=False))


@operation
def take_a_reentrant_step(q: Quantized) -> Iterator[Check]:
    yield from step(q, lambda x: checkpoint(q.layer, x, use_reentrant=True))


@operation
def take_a_step_saving_on_the_cpu(q: Quantized) -> Iterator[Check]:
    with save_on_cpu():
        yield from step(q, q.layer)


@operation
def call_functionally(q: Quantized) -> Iterator[Check]:
    with torch.no_grad():
        yield q.right(functional_call(q.layer, dict(q.layer.named_parameters()), (q.x,)))


# -- casts and moves -----------------------------------------------------------------------------------


@operation
def move(q: Quantized) -> None:
    q.layer.to(q.device)


@operation
def move_by_hand(q: Quantized) -> None:
    q.layer.weight = q.layer.weight.to(q.device)


@operation
def cast_and_cast_back(q: Quantized) -> None:
    q.layer.half().float()


@operation
def to_double_and_back(q: Quantized) -> None:
    q.layer.to(torch.float64).to(torch.float32)


@operation
def look_at_the_codes(q: Quantized) -> Iterator[Check]:
    weight = q.layer.weight
    yield same(weight.to(torch.int32).detach().as_subclass(torch.Tensor), weight.data.to(torch.int32))
    yield same(float(weight.float().mean()), float(weight.data.float().mean()))


@operation
def cut_and_join(q: Quantized) -> Iterator[Check]:
    whole = torch.cat([piece.detach().as_subclass(torch.Tensor) for piece in q.layer.weight.chunk(2)])
    yield same(whole, q.layer.weight.data.clone())


@operation
def a_copy_to_meta(q: Quantized) -> Iterator[Check]:
    yield same(copy.deepcopy(q.layer).to("meta").weight.is_meta, True)


@operation
def offload_and_bring_back(q: Quantized) -> Iterator[Check]:
    model = torch.nn.Sequential(q.layer)
    cpu_offload(model, execution_device=q.device)
    with torch.no_grad():
        yield q.right(model(q.x))
    remove_hook_from_submodules(model)


# -- copies and files ----------------------------------------------------------------------------------


@operation
def copy_shallowly(q: Quantized) -> None:
    q.layer = copy.copy(q.layer)


@operation
def copy_the_weight(q: Quantized) -> None:
    q.layer.weight = copy.copy(q.layer.weight)


@operation
def copy_deeply(q: Quantized) -> None:
    q.layer = copy.deepcopy(q.layer)


@operation
def pickle_and_unpickle(q: Quantized) -> None:
    q.layer = pickle.loads(pickle.dumps(q.layer))


@operation
def save_whole_and_load(q: Quantized) -> None:
    q.layer = _through_a_file(q.layer, weights_only=False)


@operation
def save_parameters_and_load(q: Quantized) -> Iterator[Check]:
    by_default = not hasattr(q.layer.weight, "quant_state")  # of which torch knows nothing by default
    loaded = _through_a_file(dict(q.layer.named_parameters()), weights_only=by_default)
    yield same(loaded["weight"].detach().as_subclass(torch.Tensor), q.layer.weight.data.clone())


def _through_a_file(thing: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


# -- state dicts ---------------------------------------------------------------------------------------


def _state(q: Quantized) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in q.layer.state_dict().items()}


@operation
def load_its_own_state_dict(q: Quantized) -> None:
    q.layer.load_state_dict(_state(q), strict=False)


@operation
def load_its_own_parameters(q: Quantized) -> None:
    q.layer.load_state_dict({name: p.detach().clone() for name, p in q.layer.named_parameters()})


@operation
def load_into_another_layer(q: Quantized) -> None:
    other = q.other().layer.train(q.layer.training)
    other.load_state_dict(_state(q), strict=False)
    q.layer = other


@operation
def load_by_assigning(q: Quantized) -> None:
    q.layer.load_state_dict(_state(q), strict=False, assign=True)


# -- other numbers -------------------------------------------------------------------------------------


def _becomes(q: Quantized, other: Quantized) -> None:
    q.weight, q.codes, q.scales = other.weight, other.codes, other.scales


@operation
def copy_in_other_numbers(q: Quantized) -> None:
    new = q.other(seed=5)
    for old, fresh in zip([q.layer.weight.data, *statistics(q.layer)], [new.codes, *statistics(new.layer)]):
        old.copy_(fresh)
    _becomes(q, new)


@operation
def put_in_another_parameter(q: Quantized) -> None:
    new = q.other(seed=6)
    q.layer.weight = new.layer.weight
    _becomes(q, new)


@operation
def multiply_the_scales(q: Quantized) -> None:
    scales = statistics(q.layer)
    for scale in scales[1:] if len(scales) > 1 else scales:  # those of a double quantization are codes themselves
        scale.mul_(2)
    q.weight, q.scales = q.weight * 2, q.scales * 2


@operation
def share_with_another_layer(q: Quantized) -> Iterator[Check]:
    second = q.unquantized()
    second.weight = q.layer.weight
    with torch.no_grad():
        yield q.right(second.train(q.layer.training)(q.x))


@operation
def read_the_weight(q: Quantized) -> Iterator[Check]:
    if not hasattr(q.layer.weight, "quant_state"):
        yield close(q.layer.weight.data.float() * _scale(q)[:, None] / 127, q.weight, 1e-6)
    else:
        yield close(dequantized(q.layer)[0], q.weight, 1e-6)


def _scale(q: Quantized) -> torch.Tensor:
    return q.layer.state.SCB if q.layer.weight.SCB is None else q.layer.weight.SCB
