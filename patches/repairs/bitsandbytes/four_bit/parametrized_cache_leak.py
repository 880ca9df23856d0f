"""Under non-reentrant checkpointing, parametrized 4-bit parameters keep their dequantized copies in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....engine import Finding, Patch, Rewrite

if TYPE_CHECKING:
    import torch

_MODULE = "bitsandbytes.nn.parametrize"


def always_call(module: torch.nn.Module, hook: Callable[..., Any]) -> None:
    """Let ``hook`` of ``module`` run however the forward ends, if it was registered without saying so."""
    import torch

    if not torch.compiler.is_compiling():
        for key, registered in module._forward_hooks.items():
            if registered is hook:
                module._forward_hooks_always_called[key] = True


def damage() -> tuple[str, ...]:
    """Name a cache that is on now, when no forward should be running."""
    import torch.nn.utils.parametrize as cache

    if not cache._cache_enabled:
        return ()
    return (
        f"torch's parametrization cache was on before, with {len(cache._cache)} tensors in it. If no forward is running, "
        "they are leaked; to free them: torch.nn.utils.parametrize._cache_enabled = 0 and _cache = {}",
    )


def defect() -> Finding:
    """Make three checkpointed steps of a module with a 4-bit parameter, and count the tensors in torch's cache."""
    import torch
    import torch.nn.utils.parametrize as cache

    try:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit
    except ImportError:
        return Finding(False, "this release has no parametrized 4-bit parameters")

    class Expert(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.weight)

    torch.manual_seed(0)
    expert = Expert()
    replace_parameter_4bit(expert, "weight", quant_type="nf4")
    users = cache._cache_enabled
    for _ in range(3):
        x = torch.randn(2, 64, requires_grad=True)
        torch.utils.checkpoint.checkpoint(expert, x, use_reentrant=False).sum().backward()
    leaked, kept = cache._cache_enabled - users, len(cache._cache)
    if leaked:  # leave torch as it was found
        cache._cache_enabled, cache._cache = users, {}
    return Finding(leaked > 0, f"cache left on {leaked} times after 3 steps, with {kept} dequantized weights")


PATCH = Patch(
    id="bitsandbytes-parametrized-cache-leak",
    summary="4-bit expert weights stay dequantized in memory under non-reentrant checkpointing",
    groups=("experts", "train"),
    silent=True,
    words=("OOM (out of memory)",),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1999",),
    why="""
        ``bitsandbytes.nn.parametrize`` (4-bit expert weights of MoE models) turns torch's parametrization cache on
        in a forward pre-hook and off in a forward hook. Non-reentrant checkpointing ends its recomputation with an
        exception inside the forward, and then a plain forward hook is not called. The count of users grows by one
        for every checkpointed region and step, the cache is never emptied again, and every dequantized weight stays
        in memory (53 GiB in one report). Releases 0.48.0 to 0.49.2; 0.50.0 registers the hook with
        ``always_call=True`` and keeps the count at zero or above. (#1999)
    """,
    repair="""
        The repair does the same. A module that was prepared before the patch was applied is repaired in its next
        forward. If a cache holds copies by then, the report names it.
    """,
    requires=("bitsandbytes>=0.48,<0.50",),
    tested_up_to="0.49.2",
    edits=(
        Rewrite(
            f"{_MODULE}:_register_parametrization_hooks",
            "module.register_forward_hook(_disable_parametrization_cache)",
            "module.register_forward_hook(_disable_parametrization_cache, always_call=True)",
        ),
        Rewrite(
            f"{_MODULE}:_enable_parametrization_cache",
            "P._cache_enabled += 1",
            "P._cache_enabled += 1\n_patches_always_call(module, _disable_parametrization_cache)",
            names={"_patches_always_call": always_call},
        ),
        Rewrite(
            f"{_MODULE}:_disable_parametrization_cache",
            "P._cache_enabled -= 1",
            "P._cache_enabled = max(0, P._cache_enabled - 1)",
        ),
    ),
    defect=defect,
    damage=damage,
)
