"""``model.dequantize()`` fails for a partly offloaded model, or gives other weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import CannotShow, Finding, Message, Patch, Rewrite
from ...engine.gate import satisfied
from ...loading.dequantize_offloaded_layers import replace_offloaded_layers
from ...quantized.int8.weight_moves import keep_packed_weight
from ..reproducers import tiny_models
from ..reproducers.quantized_models import load_quantized

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


def dequantize_offloaded(model: Module, quantized: type[Any], dtype: torch.dtype | None) -> bool:
    """Replace the offloaded layers of the class ``quantized``, and tell whether there were any."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    before_5 = satisfied("transformers<5")  # where it casts, too

    def dequantize(weight: Any, state: Any) -> Any:
        return dequantize_bnb_weight(weight, *((dtype, state) if before_5 else (state,)))

    return replace_offloaded_layers(model, quantized, dtype, dequantize)


def defect() -> Finding:
    """Dequantize a tiny Llama whose layers are in CPU memory."""
    import torch
    from accelerate import cpu_offload
    from transformers import BitsAndBytesConfig

    if all(map(satisfied, ("transformers>=5", "accelerate<1.14", "bitsandbytes<0.50"))):
        raise CannotShow(
            "on these releases, INT8 layers cannot be offloaded without the patch bitsandbytes-constructor-kwargs"
        )
    if satisfied("transformers<4.57"):
        raise CannotShow(
            "before transformers 4.57, INT8 models are right, and 4-bit models cannot be offloaded without the patch bitsandbytes-params4bit-meta"
        )

    def load() -> Any:
        how = BitsAndBytesConfig(load_in_8bit=True)
        return load_quantized(tiny_models.make_llama(vocab_size=8), how, device_map="cpu", dtype=torch.float32)

    expected, model = load().dequantize(), load()
    cpu_offload(model, execution_device=torch.device("cpu"))
    ids = torch.arange(4)[None]
    try:
        error = (model.dequantize()(ids).logits - expected(ids).logits).norm().item()
    except NotImplementedError as raised:
        return Finding(True, f"NotImplementedError: {str(raised).split(';')[0]}")
    return Finding(not error == 0, f"logits differ from the whole model's by {error:.1e}")


_CLASS = "target_cls = bnb.nn.Linear8bitLt if quant_method == 'llm_int8' else bnb.nn.Linear4bit"
_SOURCE = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/bitsandbytes.py"

PATCH = Patch(
    id="transformers-dequantize-offloaded",
    summary="dequantize() of a partly offloaded model fails, or silently gives wrong weights",
    groups=("offload", "merge"),
    messages=(
        Message("Cannot copy out of meta tensor; no data!", "torch/lib/libtorch_cpu.so"),
        Message(
            "SequentialHook.__init__() got an unexpected keyword argument 'hooks'",
            "accelerate/hooks.py",
            holds=("class SequentialHook(",),
        ),
    ),
    links=(f"{_SOURCE}#L287",),
    why="""
        Each quantized layer is replaced by a plain one with its dequantized weight. An offloaded weight is on meta,
        so the result is on meta too, and the layer with accelerate's new hook raises ``Cannot copy out of meta
        tensor; no data!``. Layers that were offloaded one by one have two hooks in a ``SequentialHook``, which
        cannot be made again: ``SequentialHook.__init__() got an unexpected keyword argument 'hooks'``. This affects
        programs that merge adapters into an offloaded model to save it dequantized. On transformers 5 it is an
        error. transformers 4 makes new weights on meta without an error, and the model computes with what its hooks
        bring: logits are silently 1.4 off in the reproducer.
    """,
    repair="""
        The repair replaces the offloaded layers first, one at a time. It brings the weight to its device,
        dequantizes it like any other layer, writes it to where the hook reads it (for the disk, a new file)
        and offloads it again, with its hook. So the model stays offloaded. If the weights of a layer are brought by
        a module around it, an error is raised before anything is changed.
    """,
    cost="""
        The dequantized model takes as much memory or disk as plain weights.
    """,
    requires=("transformers>=4.53", "accelerate>=0.26.1", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=(
        *(
            Rewrite(
                f"transformers.integrations.bitsandbytes:{function}",
                find=_CLASS,
                replace=f"""
                    {_CLASS}
                    has_been_replaced = _patches_dequantize_offloaded(model, target_cls, dtype){or_before}
                """,
                names={"_patches_dequantize_offloaded": dequantize_offloaded},
                when=when,
            )
            for function, or_before, when in (
                ("dequantize_and_replace", "", "transformers>=5"),
                # transformers 4 calls it for each part of the model
                ("_dequantize_and_replace", " or has_been_replaced", "transformers<5"),
            )
        ),
        *keep_packed_weight(">=0.48,<0.48.2"),  # there the hook of an INT8 layer raises an error
    ),
    defect=defect,
)
