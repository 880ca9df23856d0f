"""What accelerate brought for a forward goes when the forward ends in an exception."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import patches
from patches.quantized import accelerate_hooks

accelerate = pytest.importorskip("accelerate")

ID = "accelerate-left-on-device"


@pytest.fixture(autouse=True)
def only() -> Iterator[None]:
    with patches.applied(ID):
        yield


class Fussy(torch.nn.Linear):
    """Refuses inputs of more than two rows, as a device that is full does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            raise torch.OutOfMemoryError("too many rows")
        return super().forward(x)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Fussy(8, 8) for _ in range(3))).requires_grad_(False)


def step(net: torch.nn.Module, x: torch.Tensor, **how: object) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    y = checkpoint(net, leaf, use_reentrant=False, **how)
    y.square().sum().backward()
    return leaf.grad


def all_away(net: torch.nn.Module) -> bool:
    return all(parameter.is_meta for parameter in net.parameters())


@pytest.mark.parametrize("early_stop", [True, False])
def test_after_a_checkpointed_step(early_stop, device):
    x = torch.randn(2, 8, device=device)
    expected = step(model().to(device), x)
    offloaded = accelerate.cpu_offload(model(), torch.device(device))
    for _ in range(2):
        assert torch.equal(step(offloaded, x, early_stop=early_stop), expected)
        assert all_away(offloaded)


def test_a_smaller_batch_after_an_error(device):
    x = torch.randn(2, 8, device=device)
    expected = model().to(device)(x)
    offloaded = accelerate.cpu_offload(model(), torch.device(device))
    with pytest.raises(torch.OutOfMemoryError, match="too many rows"):
        offloaded(torch.randn(3, 8, device=device))
    assert all_away(offloaded)
    assert torch.equal(offloaded(x), expected)


def test_tied_weights_that_were_brought_are_forgotten(device, tmp_path):
    """accelerate keeps a map of tied weights that are on a device, by the pointer of what is offloaded."""
    x = torch.randn(2, 8, device=device)
    net = model()
    net[2].weight = net[0].weight
    expected = step(net.to(device), x)
    tied = model()
    tied[2].weight = tied[0].weight
    where = {str(i): "disk" for i in range(3)}
    offloaded = accelerate.dispatch_model(tied, where, main_device=device, offload_dir=tmp_path, force_hooks=True)
    assert torch.equal(step(offloaded, x), expected)
    maps = [hook.tied_params_map for hook in accelerate_hooks.hooks_on(offloaded[0]) if hook.offload]
    assert maps and all(maps)
    assert not any(copies for known in maps for copies in known.values())
    assert all_away(offloaded)


def test_other_hooks_see_what_they_saw(device):
    """A hook of the user's in the same sequence is not called for a forward that gave no output."""

    class Counts(accelerate.hooks.ModelHook):
        def __init__(self) -> None:
            self.before = self.after = 0

        def pre_forward(self, module, *args, **kwargs):
            self.before += 1
            return args, kwargs

        def post_forward(self, module, output):
            self.after += 1
            return output

    offloaded = accelerate.cpu_offload(model(), torch.device(device))
    counts = Counts()
    accelerate.hooks.add_hook_to_module(offloaded[0], counts, append=True)
    with pytest.raises(torch.OutOfMemoryError, match="too many rows"):
        offloaded(torch.randn(3, 8, device=device))
    assert (counts.before, counts.after) == (1, 0)
    assert all_away(offloaded)


def test_compiled_there_are_as_many_graphs_and_breaks_as_without_the_patch(device):
    """One more break for each hooked layer would be one more function to trace and to guard."""

    def counted() -> tuple[int, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        net = accelerate.cpu_offload(model(), torch.device(device))
        torch.compile(net, backend="eager")(torch.randn(2, 8, device=device))
        counters = torch._dynamo.utils.counters
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    patched = counted()
    patches.revert(ID)
    assert patched == counted()
    assert patched[0] > 0


def test_layers_that_are_not_offloaded_keep_their_weights(device):
    net = model().to(device)
    accelerate.dispatch_model(net, {"": device}, force_hooks=True)
    weights = [p.data_ptr() for p in net.parameters()]
    with pytest.raises(torch.OutOfMemoryError, match="too many rows"):
        net(torch.randn(3, 8, device=device))
    assert [p.data_ptr() for p in net.parameters()] == weights
