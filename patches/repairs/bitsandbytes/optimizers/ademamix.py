"""AdEMAMix allocates the wrong state: with 32 bits too little, paged on a CPU none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....engine import CannotShow, Finding, Message, Part, Patch, Rewrite, SetAttribute
from ...reproducers.training import take_steps

if TYPE_CHECKING:
    from bitsandbytes.optim import AdEMAMix32bit
    from torch import Tensor


def _of_ademamix(name: str) -> Callable[[Any], Any]:
    """Return a ``make`` that takes the method ``name`` of ``AdEMAMix``: the very function, so that its repairs hold here."""

    def make(_: None) -> Any:
        from bitsandbytes.optim import AdEMAMix

        return vars(AdEMAMix)[name]

    return make


def update_step(self: AdEMAMix32bit, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
    """Make the step of ``AdEMAMix`` if there is a schedule, else the step of its base class."""
    from bitsandbytes.optim import AdEMAMix
    from bitsandbytes.optim.optimizer import Optimizer2State

    if self.state[p]["state1"].numel() != 2 * p.numel():
        raise RuntimeError(
            f"{type(self).__name__} has allocated the optimizer state of a parameter of shape {tuple(p.shape)} without its "
            "second average, and it cannot be extended. Call optimizer.state.clear() to start with a new state."
        )
    config = self.get_config(gindex, pindex, group)
    scheduled = config["t_alpha"] or config["t_beta3"]
    (AdEMAMix if scheduled else Optimizer2State).update_step(self, group, p, gindex, pindex)


def defect_32_bits() -> Finding:
    """Make three steps of AdEMAMix32bit, and of AdEMAMix, which has 32 bits unless it is told otherwise."""
    import torch
    from bitsandbytes.optim import AdEMAMix, AdEMAMix32bit

    layers, states, errors = [], [], []
    for kind in (AdEMAMix32bit, AdEMAMix):
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 64)
        optimizer = kind(layer.parameters(), t_alpha=4)
        errors.append(take_steps(optimizer, layer, steps=3))
        layers.append(layer.weight.detach())
        states.append(optimizer.state[layer.weight]["state1"].shape)
    wrong = states[0] != states[1] or not torch.equal(*layers)
    figure = f"the first state of a weight of {tuple(layers[0].shape)} is {tuple(states[0])}"
    return Finding(wrong, f"{figure}; {errors[0]}" if errors[0] else figure)


def defect_paged() -> Finding:
    """Make a step of PagedAdEMAMix8bit on a layer with 102,400 weights, and the same of AdEMAMix8bit."""
    import torch
    from bitsandbytes.optim import AdEMAMix8bit, PagedAdEMAMix8bit

    weights, errors = [], []
    for kind in (AdEMAMix8bit, PagedAdEMAMix8bit):
        torch.manual_seed(0)
        layer = torch.nn.Linear(320, 320)
        errors.append(take_steps(kind(layer.parameters()), layer, x=torch.ones(2, 320)))
        weights.append(layer.weight.detach())
    if errors[0]:
        raise CannotShow("before 0.50 no optimizer of bitsandbytes steps on a CPU") from errors[0]
    if errors[1]:
        return Finding(True, str(errors[1]).splitlines()[0])
    off = (weights[1] - weights[0]).abs().max().item()
    return Finding(off > 0, f"weights after a step, paged against not: largest difference {off}")


_CLASS = "bitsandbytes.optim.ademamix:AdEMAMix32bit"
_PAGED = "buff = F.get_paged(*(2, *p.size()), dtype=dtype, device=p.device)"

PATCH = Patch(
    id="bitsandbytes-ademamix",
    summary="AdEMAMix32bit allocates one average and updates two; paged AdEMAMix raises an error on a CPU",
    groups=("train", "cpu"),
    silent=True,
    messages=(
        Message(
            "output with shape [64] doesn't match the broadcast shape [64, 64]",
            "torch/lib/libtorch_cpu.so",
            parts=(" doesn't match the broadcast shape ",),
        ),
        Message(
            "Method 'cget_managed_ptr' not available in CPU-only version of bitsandbytes.",
            "bitsandbytes/cextension.py",
            parts=(" not available in CPU-only version of bitsandbytes.",),
        ),
    ),
    words=("loss is nan, or does not fall",),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2075",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2076",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1901",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/optim/ademamix.py#L260",
    ),
    why="""
        ``AdEMAMix32bit`` and ``PagedAdEMAMix32bit`` allocate memory for one of the two averages that they update.
        AdEMAMix keeps a fast and a slow average of the gradient, one after the other in its first state. ``AdEMAMix``
        makes that state twice as large as the parameter. These two classes do not inherit from ``AdEMAMix`` but from
        its base class, which makes the state as large as the parameter. On a CPU (from 0.50 on) the first ``step()``
        raises ``output with shape [64] doesn't match the broadcast shape [64, 64]``. On a GPU, according to the source,
        the kernel reads and writes the slow average beyond the end of the state, in the memory of other tensors.
        ``t_alpha`` and ``t_beta3`` have no effect. All releases. ``AdEMAMix(optim_bits=32)`` is the same optimizer and
        is right.

        Paged AdEMAMix raises an error on a CPU for every parameter that is large enough to be paged. Since 0.50 the
        optimizers run on a CPU, where paged ones allocate their states like others, with a warning. AdEMAMix allocates
        the state of its two averages itself and lacks this fallback: from 100,000 values on it asks the library for
        managed memory, which a CPU does not have. ``PagedAdEMAMix`` and ``PagedAdEMAMix8bit`` (``paged_ademamix_32bit``
        and ``paged_ademamix_8bit`` of ``Trainer``) raise ``Method 'cget_managed_ptr' not available in CPU-only version
        of bitsandbytes``. Before 0.50 no optimizer runs on a CPU.
    """,
    repair="""
        The repair gives both classes the states of ``AdEMAMix``, and its step if there is a schedule. They then
        equal that optimizer bit for bit. A state of the old size, from an optimizer or a file made before, lacks
        the slow average: a step with it raises an error that says so.

        For paged AdEMAMix on a CPU, the repair allocates the state as ``AdEMAMix`` does, and the steps equal the steps
        of ``AdEMAMix`` bit for bit.
    """,
    cost="""
        For the 32-bit classes a comparison for each parameter and step.

        For paged AdEMAMix on other devices a look at the device when a paged state is made.
    """,
    former_ids=("bitsandbytes-ademamix-32bit", "bitsandbytes-paged-ademamix-cpu"),
    parts=(
        Part(
            "32 bits",
            ("bitsandbytes>=0.46.1",),
            "0.50.2",
            (
                *(
                    SetAttribute(f"{_CLASS}.{name}", make=_of_ademamix(name))
                    for name in ("init_state", "_get_state_double_buffer")
                ),
                SetAttribute(f"{_CLASS}.update_step", value=update_step),
            ),
            defect_32_bits,
        ),
        Part(
            "paged",
            ("bitsandbytes>=0.50",),
            "0.50.2",
            (
                Rewrite(
                    "bitsandbytes.optim.ademamix:AdEMAMix._get_state_double_buffer",
                    _PAGED,
                    'if p.device.type == "cpu":\n'
                    "    return torch.zeros((2, *p.size()), dtype=dtype, device=p.device)\n"
                    f"{_PAGED}",
                ),
            ),
            defect_paged,
        ),
    ),
)
