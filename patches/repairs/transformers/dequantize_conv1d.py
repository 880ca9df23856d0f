"""A dequantized GPT-2 is saved with transposed weights: it cannot be loaded, or is loaded wrongly."""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ...loading.source_layers import make_source_layer, to_source_layout
from ..reproducers.quantized_models import load_quantized


def defect() -> Finding:
    """Quantize a GPT-2 from disk, dequantize it, save it, and load it again."""
    import tempfile

    import torch
    from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=32)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    ids = torch.arange(8)[None]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = load_quantized(GPT2LMHeadModel(config), how, device_map="cpu").dequantize().float().eval()
        expected = model(ids).logits
        model.save_pretrained(folder)
        try:
            again = GPT2LMHeadModel.from_pretrained(folder).float().eval()
        except RuntimeError as error:
            if "mismatch" not in str(error):
                raise
            return Finding(True, "the dequantized model cannot be loaded again: its weights are transposed")
        off = ((again(ids).logits - expected).norm() / expected.norm()).item()
    return Finding(off > 1e-5, f"relative error of the logits after loading again {off:.1e}")


_FROM_5 = "transformers.integrations.bitsandbytes:dequantize_and_replace", "transformers>=5"
_BEFORE_5 = "transformers.integrations.bitsandbytes:_dequantize_and_replace", "transformers<5"
_LINEAR = "torch.nn.Linear(module.in_features, module.out_features, bias=bias is not None)"
_DEQUANTIZED = "dequantize_bnb_weight(module.weight, dtype, state)"

PATCH = Patch(
    id="transformers-dequantize-conv1d",
    summary="a dequantized GPT-2 is saved with transposed weights: it cannot be loaded, or gets random weights",
    groups=("save", "merge"),
    silent=True,
    links=(
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/bitsandbytes.py#L287",
    ),
    why="""
        GPT-2 and its descendants have ``Conv1D`` layers, whose weights are stored transposed. transformers
        transposes them when it quantizes, and notes on each layer the class that it was made from. ``dequantize()``
        ignores this note and makes each layer an ``nn.Linear``. The model computes correctly, but
        ``save_pretrained`` writes the weights of ``nn.Linear`` under names for which the class expects the shapes
        of ``Conv1D``. ``from_pretrained`` then raises ``You set `ignore_mismatched_sizes` to `False```. With
        ``True``, layers that are not square get random weights, and square ones transposed weights (relative error
        of the logits 0.8); a table in the log says so. All releases that have ``dequantize()``.
    """,
    repair="""
        The repair makes the original kind of layer: a ``Conv1D`` with the dequantized weight in its layout. Outputs
        equal the outputs of the ``nn.Linear`` except for the order of summation. Models without ``Conv1D`` get the
        same layers as before. If you saved a checkpoint without the repair, save it again.
    """,
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=(
        *(
            Rewrite.to_call(target, _LINEAR, make_source_layer, "module, bias", when)
            for target, when in (_FROM_5, _BEFORE_5)
        ),
        Rewrite(
            _FROM_5[0],
            find="torch.nn.Parameter(weight)",
            replace="torch.nn.Parameter(_patches_to_source_layout(module, weight))",
            names={"_patches_to_source_layout": to_source_layout},
            when=_FROM_5[1],
        ),
        Rewrite.to_call(_BEFORE_5[0], _DEQUANTIZED, to_source_layout, f"module, {_DEQUANTIZED}", _BEFORE_5[1]),
    ),
    defect=defect,
)
