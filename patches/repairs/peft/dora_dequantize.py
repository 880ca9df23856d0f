"""torch.compile breaks the graph at every DoRA layer, where the base weight is dequantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Message, Patch, Rewrite
from ...quantized.four_bit import quant_states
from ...quantized.int8 import row_scales
from ...quantized.weights import dense_weight
from ..reproducers.adapted_layer import quantized_layer
from ..reproducers.graphs import show_graphs

if TYPE_CHECKING:
    import torch


def is_torchao(weight: torch.Tensor) -> bool:
    """Tell whether torchao made ``weight``: peft's test, with an answer for parameters that Dynamo can follow."""
    import torch

    if type(weight) is torch.nn.Parameter and torch.compiler.is_compiling():
        return False
    return type(weight).__module__.startswith("torchao.")


def traced(module: Any, weight: torch.nn.Parameter) -> torch.Tensor:
    """Return the weight of ``module`` while compiling, dequantized if bitsandbytes quantized it."""
    import bitsandbytes as bnb

    if isinstance(weight, bnb.nn.Params4bit):
        four_bit: torch.Tensor = bnb.functional.dequantize_4bit(weight, quant_states.get_quant_state(weight))
        return four_bit
    if isinstance(weight, bnb.nn.Int8Params):
        int8: torch.Tensor = bnb.functional.int8_vectorwise_dequant(weight, row_scales.known_scales(module))
        return int8
    return dense_weight.weight_or_dense(module, weight)


def defect() -> Finding:
    import torch
    from peft import LoraConfig, get_peft_model

    base = torch.nn.Sequential(quantized_layer(int8=False, bias=False))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0"], use_dora=True)).train()
    return show_graphs(model, torch.randn(2, 64))


TARGET = "peft.utils.integrations:dequantize_module_weight"

PATCH = Patch(
    id="peft-dora-dequantize",
    summary="torch.compile breaks the graph at every DoRA layer",
    groups=("compile",),
    messages=(
        Message("Unsupported tensor subclass overridden attribute access", "torch/_dynamo/variables/torch_function.py"),
    ),
    words=("graph break",),
    links=("https://github.com/huggingface/peft/blob/main/src/peft/utils/integrations.py",),
    why="""
        DoRA needs the dequantized base weight in every forward. ``dequantize_module_weight`` recognizes weights by
        the names of classes and modules (``type(weight).__module__.startswith``, ``weight.__class__.__name__``),
        which Dynamo cannot trace on a parameter. It also reads ``.data``, and on a CPU assigns the weight to the
        module again. Each of these breaks the graph in each layer: 45 graphs and 33 breaks in a 4-bit Llama of 3
        layers with LoRA on all linear layers. All releases that have the function.
    """,
    repair="""
        While compiling, the repair recognizes bitsandbytes weights and plain parameters by their type, and
        dequantizes them by the same call: ``dequantize_4bit`` on the parameter, or ``int8_vectorwise_dequant`` with
        the scales of the layer or its weight. The result is bit-equal. Eager calls run as before.
    """,
    requires=("peft>=0.15", "bitsandbytes>=0.46.1", "torch>=2.8"),
    tested_up_to="0.21.2",
    edits=(
        Rewrite.to_call(TARGET, 'type(module.weight).__module__.startswith("torchao.")', is_torchao, "module.weight"),
        Rewrite(
            TARGET,
            find="cls_name = weight.__class__.__name__",
            replace="""
                if torch.compiler.is_compiling():
                    return _patches_traced(module, weight)
                cls_name = weight.__class__.__name__
            """,
            names={"_patches_traced": traced},
        ),
    ),
    defect=defect,
)
