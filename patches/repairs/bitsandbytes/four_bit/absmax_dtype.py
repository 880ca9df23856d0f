"""A double-quantized 4-bit checkpoint that was cast to half precision loads silently, and its outputs are garbage."""

from __future__ import annotations

from ....engine import Finding, Patch, Rewrite
from ...reproducers import tiny_models


def defect() -> Finding:
    """Cast the file of a tiny Llama in 4 bits to float16, and load it."""
    import tempfile

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    load = {"device_map": "cpu", **tiny_models.in_dtype(torch.float32)}
    ids = torch.arange(8)[None]
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.save_llama(folder, hidden_size=128)
        model = LlamaForCausalLM.from_pretrained(folder, quantization_config=how, **load)
        model.save_pretrained(folder)
        file = f"{folder}/model.safetensors"
        cast = {key: t.half() if t.is_floating_point() else t for key, t in load_file(file).items()}
        save_file(cast, file, metadata={"format": "pt"})
        shrunk = LlamaForCausalLM.from_pretrained(folder, **load)
    with torch.no_grad():
        expected, found = model(ids).logits, shrunk(ids).logits
    error = ((found - expected).norm() / expected.norm()).item()
    return Finding(not error < 0.05, f"a checkpoint that was cast to float16: logits off by {error:.1e} of their norm")


_READ = "bitsandbytes.functional:QuantState.from_dict"
_BLOCKS = "bitsandbytes.functional:dequantize_blockwise"

PATCH = Patch(
    id="bitsandbytes-absmax-dtype",
    summary="a double-quantized 4-bit checkpoint that was cast to half precision loads silently, and outputs are garbage",
    groups=("save", "layers"),
    silent=True,
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/functional.py#L501",),
    why="""
        Scripts that shrink a checkpoint cast each of its floating-point tensors: ``{k: v.half() if
        v.is_floating_point() else v ...}``. With ``bnb_4bit_use_double_quant=True`` this casts the absmax of the
        absmax and two code books. ``from_pretrained`` puts them into the quantization state as they are. CPU
        kernels read them as float32, so they take two values for one and read beyond the end. Outputs are NaN, or
        wrong by as much as their size, and differ from run to run. In the same way, ``torch.tensor(nested_offset)``
        takes torch's default dtype: after ``torch.set_default_dtype(torch.bfloat16)`` each scale of a loaded layer
        is off by up to 0.4 % of the mean scale. 0.46.1 to 0.50.2. ``model.half()`` and ``model.to(torch.bfloat16)``
        are not affected, because they do not touch quantization states.
    """,
    repair="""
        The repair casts these tensors to float32, as bitsandbytes writes them, when a checkpoint is loaded and when
        an operation reads them. A tensor that is float32 already is used itself. What the cast to half precision
        rounded away stays lost: 0.1 % of the scales in float16.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        *(
            Rewrite(_READ, f'qs_dict["{key}"].to(device)', f'qs_dict["{key}"].to(device, torch.float32)')
            for key in ("nested_absmax", "nested_quant_map", "quant_map")
        ),
        Rewrite(
            _READ,
            'qs_dict["absmax"].to(device)',
            'qs_dict["absmax"].to(device, dtype=torch.float32 if state2 is None else None)',
        ),
        Rewrite(
            _READ,
            'torch.tensor(float(qs_dict["nested_offset"]))',
            'torch.tensor(float(qs_dict["nested_offset"]), dtype=torch.float32)',
        ),
        Rewrite(
            _BLOCKS,
            "absmax = quant_state.absmax",
            "absmax = quant_state.absmax if quant_state.nested else quant_state.absmax.float()",
        ),
        Rewrite(_BLOCKS, "quant_state.code.to(A.device)", "quant_state.code.to(A.device, torch.float32)", count=2),
        Rewrite(
            "bitsandbytes.backends.default.ops:_gemm_4bit_default_impl",
            "torch.ops.bitsandbytes.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, 256, torch.float32)",
            """
                torch.ops.bitsandbytes.dequantize_blockwise.default(
                    absmax_8bit, absmax.float(), absmax_code.float(), 256, torch.float32
                )
            """,
            when="bitsandbytes>=0.50",
        ),
    ),
    defect=defect,
)
