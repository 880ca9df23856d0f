"""``replace_lora_weights_loftq`` works only on CUDA and XPU, and only for 4-bit layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...engine import Finding, Message, Patch, Rewrite
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ...quantized.weights import dense_weight

if TYPE_CHECKING:
    from torch import Tensor


def _kinds(four_bits: type) -> tuple[type, ...]:
    """Return the LoRA layers of peft around layers of bitsandbytes."""
    from peft.tuners.lora import Linear8bitLt

    return four_bits, Linear8bitLt


def _compute_device(weight: Tensor) -> Any:
    """Return the device for ``init_lora_weights="loftq"``: an accelerator as before, else the device of ``weight``."""
    import torch

    accelerator = "xpu" if torch.xpu.is_available() else "cuda"
    return accelerator if accelerator == "xpu" or torch.cuda.is_available() else weight.device


def _initial(init: Callable[..., Any], layer: Any, weight: Tensor, num_bits: int, reduced_rank: int) -> Any:
    """Return ``lora_A`` and ``lora_B`` for ``layer``, whose base layer had ``weight`` before it was quantized."""
    import torch
    from peft.utils.loftq_utils import _low_rank_decomposition

    base = layer.get_base_layer()
    if not dense_weight.is_packed_int8(base):
        return init(base.weight, weight, num_bits=num_bits, reduced_rank=reduced_rank)
    dense = dense_weight.dequantize_weight(base, torch.float32)
    parts = _low_rank_decomposition(weight.to(dense.device, torch.float32) - dense, reduced_rank=reduced_rank)
    return parts["R"], parts["L"]


def defect() -> Finding:
    """Start LoRA with the quantization error of a layer on the CPU."""
    import tempfile

    import bitsandbytes as bnb
    import torch
    from peft import LoraConfig, get_peft_model, replace_lora_weights_loftq
    from safetensors.torch import save_file

    torch.manual_seed(0)
    plain, x = torch.nn.Linear(64, 64, bias=False), torch.randn(4, 64)
    expected = plain(x).detach()
    base: Any = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    base.load_state_dict(plain.state_dict())
    model: Any = torch.nn.Sequential(base).to("cpu")
    model.is_loaded_in_4bit = True
    with tempfile.TemporaryDirectory() as folder:
        save_file({"0.weight": plain.weight.detach()}, f"{folder}/model.safetensors")
        before = float((model(x) - expected).norm())
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=["0"]))
        try:
            replace_lora_weights_loftq(model, model_path=folder)
        except (AssertionError, RuntimeError) as error:
            return Finding(True, f"replace_lora_weights_loftq of a layer on the CPU: {error}")
    after = float((model(x) - expected).norm())
    return Finding(
        after >= before, f"the error of quantization after it, divided by the one before: {after / before:.2f}"
    )


_TARGET = "peft.utils.loftq_utils:{}"
_DEVICE = '"xpu" if is_xpu_available() else "cuda"'
_ON: dict[str, Any] = {
    "replace": "_patches_compute_device(weight)",
    "names": {"_patches_compute_device": _compute_device},
}

PATCH = Patch(
    id="peft-loftq-device",
    summary="LoftQ fails without CUDA, and replace_lora_weights_loftq on a second GPU and for INT8 layers",
    groups=("cpu", "train"),
    messages=(Message("No bnb LoRA module found on the model", "peft/utils/loftq_utils.py"),),
    links=("https://github.com/huggingface/peft/blob/main/src/peft/utils/loftq_utils.py",),
    why="""
        ``replace_lora_weights_loftq`` moves the original weight to ``"cuda"``, wherever the quantized layer is. On a
        CPU this raises ``Torch not compiled with CUDA enabled``. For a layer on a second GPU, or on the CPU of a
        machine with a GPU, it raises an error about two devices. For an INT8 model it raises ``No bnb LoRA module found
        on the model``. All releases of peft that have it.

        ``init_lora_weights="loftq"`` moves the weight of an unquantized layer to ``"cuda"`` in the same way, and
        fails where there is none.

        In peft 0.14 every merge into a quantized layer on a CPU, and OLoRA on a CPU, moves the weight to ``"cuda"``,
        too. Since 0.15 both check whether CUDA is available.
    """,
    repair="""
        The repair computes on the device of the quantized weight, and for ``init_lora_weights="loftq"`` on the
        device of the weight where there is neither CUDA nor XPU. It initializes LoRA on INT8 layers in the same
        way: by the leading singular vectors of the quantization error, which peft's own function computes. On CUDA
        the 4-bit result stays the same.
    """,
    requires=("peft>=0.14", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=(
        Rewrite(_TARGET.format("loftq_init"), _DEVICE, when="peft>=0.15", **_ON),
        Rewrite(_TARGET.format("loftq_init"), '"cuda"', when="peft<0.15", **_ON),
        Rewrite(_TARGET.format("_loftq_init_new"), _DEVICE, "qweight.device", when="peft>=0.15"),
        Rewrite(_TARGET.format("_loftq_init_new"), '"cuda"', "qweight.device", when="peft<0.15"),
        Rewrite(
            _TARGET.format("replace_lora_weights_loftq"),
            "isinstance(module, Linear4bit)",
            "isinstance(module, _patches_kinds(Linear4bit))",
            names={"_patches_kinds": _kinds},
        ),
        Rewrite.to_call(
            _TARGET.format("replace_lora_weights_loftq"),
            "_loftq_init_new(module.weight, tensor, num_bits=4, reduced_rank=reduced_rank)",
            _initial,
            "_loftq_init_new, module, tensor, num_bits=4, reduced_rank=reduced_rank",
        ),
        Rewrite(
            "peft.utils.integrations:dequantize_bnb_weight",
            'torch.device("cuda")',
            "torch.device(_patches_compute_device(weight))",
            names={"_patches_compute_device": _compute_device},
            when="peft<0.15",
        ),
        *KEEP_PACKED_WEIGHT_BEFORE_048,  # get_peft_model moves the layer
    ),
    defect=defect,
)
