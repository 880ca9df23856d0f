"""An optimizer override of one parameter is applied to all parameters that were given in the same call.

``GlobalOptimManager.override_config`` takes a list of parameters and stores the same dict for each: the one that it
was given, or one made of ``key`` and ``value``. A later call for one of these parameters writes into that dict. So the
others get the override too, as does the caller's own dict and every parameter that is given it later. Example: some
layers have a lower learning rate, then one of them gets 32-bit states; all of them get 32-bit states. There is no
message. All releases; before 0.50 only if the parameters are registered afterwards, because overrides had no effect
otherwise.

The repair stores one dict for each parameter. If the caller passed a dict, later overrides go into a separate layer
above it, so that changes of the caller's dict count as before.

What it costs: nothing in a step of a parameter without override.

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
