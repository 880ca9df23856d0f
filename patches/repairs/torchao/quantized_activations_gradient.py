"""A torchao layer that quantizes its activations passes no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...engine import Finding, Message, Patch, Rewrite
from ...process import tracing

if TYPE_CHECKING:
    import torch

_ACTIVATION_CONFIGS = {
    "Int8Tensor": "act_quant_kwargs",
    "Float8Tensor": "act_quant_kwargs",
    "IntxUnpackedToInt8Tensor": "activation_quantization",
    "LinearActivationQuantizedTensor": "input_quant_func",
}
"""The attribute of each kind of weight that says how it quantizes activations; it is ``None`` if it does not."""


def _dispatched(
    implementation: Callable[..., Any], func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``implementation`` of ``func``, and give its result a gradient if it is a product that loses it."""
    import torch

    if func is not torch.nn.functional.linear or len(args) < 2 or not _loses_gradient(args[0], args[1]):
        return implementation(func, types, args, kwargs)
    from ...operators.straight_through import StraightThrough

    x, weight, *bias = args
    # Detached: in fp8 autograd would follow the input to an operator that has no gradient.
    output = implementation(func, types, (x.detach(), weight, *bias), kwargs)
    return StraightThrough.apply(output, x, weight)  # type: ignore[no-untyped-call]


def _loses_gradient(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Tell whether a gradient is wanted for ``x``, and the product with ``weight`` rounds ``x`` to 8 bits."""
    import torch

    if not torch.is_grad_enabled() or not x.requires_grad:
        return False
    kind = type(weight).__name__
    how = getattr(weight, _ACTIVATION_CONFIGS.get(kind, ""), None)
    if how is None or getattr(how, "hp_value_ub", None) is not None:
        return False
    if kind == "LinearActivationQuantizedTensor" and x.numel() == 0:
        return False  # it returns the input itself
    return tracing.for_this_process() or not torch.compiler.is_compiling()


def defect() -> Finding:
    """Train a layer below one that quantizes its activations."""
    import torch
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    torch.manual_seed(0)
    below, head = torch.nn.Linear(32, 64), torch.nn.Linear(64, 16)
    x, wanted = torch.randn(8, 32), torch.randn(8, 16)
    (reference,) = torch.autograd.grad(head(below(x)), below.weight, wanted)
    quantize_(head, Int8DynamicActivationInt8WeightConfig())
    head(below(x)).backward(wanted)
    if below.weight.grad is None:
        return Finding(True, "the layer below gets no gradient")
    error = ((below.weight.grad - reference).norm() / reference.norm()).item()
    return Finding(error > 0.01, f"gradient of the layer below: relative error {error:.4f}")


PATCH = Patch(
    id="torchao-quantized-activations-gradient",
    summary="layers with INT8 activations pass no gradient; with fp8 activations backward raises an error",
    groups=("train",),
    silent=True,
    messages=(
        Message(
            "derivative for aten::_scaled_mm is not implemented",
            "torch/lib/libtorch_cpu.so",
            holds=("derivative for ",),
        ),
    ),
    links=("https://github.com/pytorch/ao/issues/4376",),
    why="""
        ``Int8DynamicActivationInt8WeightConfig`` rounds the input of a layer to integers, and autograd ends there:
        ``x.grad`` is silently ``None``. In a LoRA model each adapter still gets the gradient of its own branch, so
        the loss falls. But a tensor gets no gradient if every path to it passes a layer without an adapter: 8 of 12
        LoRA tensors of a small Llama with adapters on ``q_proj``, ``v_proj`` and ``down_proj``. transformers
        reports this configuration as trainable, and its Trainer starts. ``Int8StaticActivationInt8WeightConfig``
        and ``Int8DynamicActivationIntxWeightConfig`` behave in the same way. The fp8 variant,
        ``Float8DynamicActivationFloat8WeightConfig``, raises an error: ``derivative for aten::_scaled_mm is not
        implemented`` (ao #4376). Weight-only configurations have gradients. torchao 0.14.1 to 0.18.0, both versions
        of the configuration.
    """,
    repair="""
        The repair leaves the forward to torchao, bit for bit, and gives its result the gradient that
        quantization-aware training uses: straight through the rounding, times the dequantized weight, ``grad @
        W.dequantize()``. Inputs that a static scale clips get no gradient. The gradient of a bias is torchao's. The
        weight is kept by reference, in 8 bits, until backward, so saved-tensor hooks and checkpointing have nothing
        more to carry. With autograd off, and while torch.export traces, nothing changes. Not repaired: fp8 with an
        upper bound for the activations, because the bound depends on the measured values.
    """,
    cost="""
        In backward one dequantized weight at a time and the product with it, as for every quantized layer that is
        trained. A compiled model stays one graph, but torch's AOT autograd cache does not store graphs with a
        custom function, so each process compiles the training step again.
    """,
    requires=("torchao>=0.14.1",),
    tested_up_to="0.18.0",
    edits=tuple(
        Rewrite(
            "torchao.utils:_dispatch__torch_function__",
            find=f"cls.{table}[cls][func](func, types, args, kwargs)",
            replace=f"_patches_dispatched(cls.{table}[cls][func], func, types, args, kwargs)",
            names={"_patches_dispatched": _dispatched},
            when=when,
        )
        for table, when in (("_TORCH_FN_TABLE", "torchao>=0.15"), ("_ATEN_OP_OR_TORCH_FN_TABLE", "torchao<0.15"))
    ),
    defect=defect,
)
