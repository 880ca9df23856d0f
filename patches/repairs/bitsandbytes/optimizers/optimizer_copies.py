"""A copied or unpickled optimizer of bitsandbytes cannot step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ....engine import Finding, Message, Patch, Rewrite, SetAttribute
from ....optimizers.parameter_overrides import BY_PARAMETER
from ...reproducers.training import take_steps

if TYPE_CHECKING:
    from bitsandbytes.optim.optimizer import Optimizer8bit
    from torch import Tensor

_SET_BY_CONSTRUCTORS = ("initialized", "name2qmap", "is_paged", "non_castable_tensor_keys", "args", "optimizer_name")
_OVERRIDES = "_patches_overrides"


def __getstate__(self: Optimizer8bit) -> dict[str, Any]:
    """Return the state that torch copies, and the attributes and overrides that an optimizer of bitsandbytes has beside it."""
    from torch.optim import Optimizer

    given = Optimizer.__getstate__(self)
    own = vars(self)
    paged = any(getattr(value, "is_paged", False) for state in self.state.values() for value in state.values())
    if "mng" in own and not paged:
        given.update({name: own[name] for name in _SET_BY_CONSTRUCTORS if name in own})
        given[_OVERRIDES] = list(_overrides(self))
    return given


def _overrides(optimizer: Optimizer8bit) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield the parameters of ``optimizer`` that have a configuration of their own, each with that configuration."""
    if not optimizer.initialized:
        optimizer.check_overrides()  # as its first step does: look for overrides that were made by module
    manager = optimizer.mng
    for gindex, group in enumerate(optimizer.param_groups):
        for pindex, parameter in enumerate(group["params"]):
            by_place = manager.index2config.get((gindex, pindex), {})
            if config := {**by_place, **manager.pid2config.get(id(parameter), {})}:
                yield parameter, config


def with_managers(optimizer: Optimizer8bit, state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` for ``__setstate__``: if it is the one of a copy, with the managers of this process."""
    from bitsandbytes.functional import GlobalPageManager
    from bitsandbytes.optim import GlobalOptimManager

    if _OVERRIDES not in state:  # load_state_dict, or a file that was written unpatched
        return state
    manager = GlobalOptimManager.get_instance()
    for parameter, config in state[_OVERRIDES]:
        manager.override_config(parameter, key_value_dict=dict(config))
    kept = {name: value for name, value in state.items() if name != _OVERRIDES}
    return {**kept, "mng": manager, "page_mng": GlobalPageManager.get_instance()}


def defect() -> Finding:
    """Train with Adam8bit, and go on with a copy and from a file."""
    import copy
    import io

    import torch
    from bitsandbytes.optim import Adam8bit

    def step(model: torch.nn.Module, optimizer: Adam8bit) -> str:
        optimizer.zero_grad()
        error = take_steps(optimizer, model)
        # Before 0.50 nothing steps on a CPU.
        return str(error) if error and "on the same GPU" not in str(error) else "steps"

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = Adam8bit(model.parameters())
    step(model, optimizer)
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    copies = {"copied": copy.deepcopy((model, optimizer)), "loaded": torch.load(file, weights_only=False)}
    step(model, optimizer)
    found = {name: step(*pair) for name, pair in copies.items()}
    for name, (other, _) in copies.items():
        if found[name] == "steps" and not torch.equal(other.weight, model.weight):
            found[name] = "steps elsewhere"
    return Finding(set(found.values()) != {"steps"}, "; ".join(f"{name}: {what}" for name, what in found.items()))


_OPTIMIZER = "bitsandbytes.optim.optimizer:Optimizer8bit"

PATCH = Patch(
    id="bitsandbytes-optimizer-copies",
    summary="a deep-copied or unpickled 8-bit optimizer cannot step",
    groups=("save", "train"),
    messages=(
        Message(
            "'Adam8bit' object has no attribute 'initialized'",
            "figure",
            parts=("object has no attribute 'initialized'",),
        ),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/optim/optimizer.py#L189",),
    why="""
        torch copies and pickles what ``Optimizer.__getstate__`` returns: defaults, states and groups. The
        optimizers of bitsandbytes have more attributes, set in ``__init__`` (whether their states have 8 bits,
        their code books, names), which it does not return. After ``copy.deepcopy((model, optimizer))``, or after
        ``torch.save`` and ``torch.load`` of an optimizer, ``step()``, ``load_state_dict()`` and since 0.49.2
        ``state_dict()`` raise ``'Adam8bit' object has no attribute 'initialized'`` (or
        ``'non_castable_tensor_keys'``). All releases; torch's own optimizers can be copied.
    """,
    repair="""
        The repair returns these attributes as well, and the configuration that overrides gave to the parameters, so
        that the copied parameters have it too. Objects that exist once in a process (the managers) are the ones of
        the process of the copy. A copy steps exactly as the original does, bit for bit.

        Paged states are in memory that cannot be copied. Such an optimizer is copied as before, and the copy cannot
        step: use ``state_dict()``. A file that was written without the plugin cannot step either, because nothing
        restores all that it lacks.
    """,
    cost="""
        Nothing in a step.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        SetAttribute(f"{_OPTIMIZER}.__getstate__", value=__getstate__),
        Rewrite(
            f"{_OPTIMIZER}.__setstate__",
            "super().__setstate__(state)",
            "super().__setstate__(_patches_joined(self, state))",
            names={"_patches_joined": with_managers},
        ),
        BY_PARAMETER,
    ),
    defect=defect,
)
