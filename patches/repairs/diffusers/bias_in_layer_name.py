"""A 4-bit layer whose name has "bias" in it does not load from a quantized checkpoint."""

from __future__ import annotations

from ...config.quantizers import QUANTIZERS_OF_DIFFUSERS
from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers import image_models


def defect() -> Finding:
    """Load a tiny T5 decoder of Spectrogram Diffusion, whose layers are called ``scale_bias``, in 4 bits, save and load it."""
    import tempfile

    import torch
    from diffusers import BitsAndBytesConfig, T5FilmDecoder

    torch.manual_seed(0)
    sizes = {
        "input_dims": 16,
        "targets_length": 16,
        "d_model": 64,
        "num_layers": 1,
        "num_heads": 2,
        "d_kv": 32,
        "d_ff": 64,
    }
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    options = {"torch_dtype": torch.float32, "device_map": "cpu"}
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as folder, image_models.as_with_gpu():
        T5FilmDecoder(**sizes).save_pretrained(base)
        model = T5FilmDecoder.from_pretrained(base, quantization_config=how, **options)
        model.save_pretrained(folder)
        try:
            again = T5FilmDecoder.from_pretrained(folder, **options)
        except ValueError as error:
            return Finding(True, f"ValueError: {error}")
    layers = (each.decoders[0].layer[0].FiLMLayer.scale_bias.weight.data for each in (again, model))
    same = torch.equal(*layers)
    return Finding(not same, "saved and loaded" if same else "other weights were loaded")


PATCH = Patch(
    id="diffusers-bias-in-layer-name",
    summary='a 4-bit layer whose name has "bias" in it does not load from a quantized checkpoint',
    groups=("save",),
    messages=(
        Message(
            "Expected the flattened shape of the current param (decoders.0.layer.0.FiLMLayer.scale_bias.weight) to be torch.Size([16384, 1]) but is (32768,).",
            "diffusers/quantizers/bitsandbytes/bnb_quantizer.py",
            parts=("Expected the flattened shape of the current param (",),
        ),
    ),
    links=(
        "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/quantizers/bitsandbytes/bnb_quantizer.py#L203",
    ),
    why="""
        Before packed weights are loaded, their shape is compared with the one that the layer should have. A parameter
        whose name has "bias" anywhere in it is taken for a bias, which is not packed. So the weights of layers that
        are called ``scale_bias`` (``T5FilmDecoder``) or ``to_bias`` (``RFD4ProteinaTransformer``) are refused. The
        model was quantized and saved without an error. diffusers 0.33 to 0.42.
    """,
    repair="""
        With the repair a parameter is a bias if the last component of its name has "bias" in it. All other names are
        compared as before.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite(
            f"{QUANTIZERS_OF_DIFFUSERS[0]}.check_quantized_param_shape",
            find="'bias' in param_name",
            replace="'bias' in param_name.rpartition('.')[2]",
        ),
    ),
    defect=defect,
)
