"""If the forward of an offloaded layer raises an exception, its weights stay on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ...quantized import accelerate_hooks

if TYPE_CHECKING:
    from torch.nn import Module


def run_and_offload(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``module._old_forward(*args, **kwargs)``; if it raises, offload the weights that were brought for it."""
    offloading = [hook for hook in accelerate_hooks.hooks_on(module) if getattr(hook, "offload", False) is True]
    forward: Any = module._old_forward
    try:
        return forward(*args, **kwargs)
    except BaseException:
        for hook in offloading:
            hook.post_forward(module, None)
        raise


def defect() -> Finding:
    """Take a checkpointed step through two offloaded layers, and count the bytes that are still on the device."""
    import torch
    from accelerate import cpu_offload
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2))).requires_grad_(False)
    cpu_offload(model, execution_device=torch.device("cpu"))
    x = torch.randn(2, 64, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    left = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    return Finding(left > 0, f"{left} bytes of offloaded weights are on the device after backward")


PATCH = Patch(
    id="accelerate-left-on-device",
    summary="under non-reentrant checkpointing an offloaded layer stays on the device after backward",
    groups=("offload", "train"),
    silent=True,
    words=("OOM (out of memory)",),
    links=("https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/hooks.py#L186",),
    why="""
        accelerate brings the weights of an offloaded layer to the device before its forward and takes them away in
        a statement after it. That statement is not reached if the forward raises. Non-reentrant checkpointing ends
        every recomputation with an exception, once backward has all that it needs (``set_checkpoint_early_stop``,
        the default). So in training the last layer of each checkpoint stays on the device until its next forward.
        If each checkpoint is one layer, all layers stay, and offloading saves no memory. The same happens after an
        out-of-memory error: the layer keeps its weights on the device while the caller tries a smaller batch.
        accelerate up to 1.15, plain and quantized layers.
    """,
    repair="""
        The repair takes the weights away in this case too, and raises the exception again. Models that were
        dispatched before the patch was applied keep their old forward. A compiled model has as many graphs and
        graph breaks as before.
    """,
    requires=("accelerate>=0.26",),
    tested_up_to="1.15.0",
    edits=(
        Rewrite.to_call(
            "accelerate.hooks:add_hook_to_module",
            find="module._old_forward(*args, **kwargs)",
            function=run_and_offload,
            arguments="module, args, kwargs",
            count=2,
        ),
    ),
    defect=defect,
)
