"""An optimizer override of one parameter is given to all that had one together with it.

``GlobalOptimManager.override_config`` takes a list of parameters, and notes for each of them the very dict that it was
called with, or made of ``key`` and ``value``. A later call for one of them writes into that dict: the others have the
override as well, and so has the dict of the caller, and whatever parameter that is given to next. Who lets some layers
learn more slowly, and then gives one of them states of 32 bits, has 32 bits in all of them; with another learning rate
they train with it. Nothing is said. All releases; before 0.50 where the parameters are registered after it, which was
the only way that overrides had an effect.

The repair notes a dict for each parameter; over one that the caller has, a layer of its own, into which later overrides
are written: what the caller writes there counts as before. It costs nothing in a step of a parameter without override.

Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2029
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping
from typing import Any

from ....engine import Finding, Patch, Rewrite


def own(given: dict[str, Any], is_callers: bool) -> MutableMapping[str, Any]:
    """What one parameter has of ``given``, and what only it will have. The caller may go on to write into its dict."""
    return ChainMap({}, given) if is_callers else dict(given)


def defect() -> Finding:
    """Give two layers a learning rate, then the second one 32 bits, and look what the first has."""
    import contextlib

    import torch
    from bitsandbytes.optim import Adam8bit, GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    first, second = model.parameters()
    manager.override_config([first, second], "lr", 1e-4)
    manager.override_config(second, "optim_bits", 32)
    manager.register_parameters(model.parameters())
    optimizer = Adam8bit(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    with contextlib.suppress(AttributeError, RuntimeError):  # before 0.50 there is no step on a CPU, but its state
        optimizer.step()
    dtype = optimizer.state[first]["state1"].dtype
    return Finding(dtype != torch.uint8, f"8-bit state of the other layer: {dtype}")


PATCH = Patch(
    id="bitsandbytes-override-shared-dict",
    summary="an 8-bit optimizer's override of one parameter also changes all parameters given in the same list",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2029",),
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            "bitsandbytes.optim.optimizer:GlobalOptimManager.override_config",
            "self.pid2config[id(p)] = key_value_dict",
            "self.pid2config[id(p)] = _patches_own(key_value_dict, key is None or value is None)",
            names={"_patches_own": own},
        ),
    ),
    defect=defect,
)
