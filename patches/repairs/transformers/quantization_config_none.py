"""``quantization_config=None`` loads the packed weights of a checkpoint as if they were plain weights."""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, Rewrite
from ..reproducers import tiny_models
from ..reproducers.quantized_models import save_quantized

_KEY = "quantization_config"


def without_none(stored: dict[str, Any], kwargs: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` for the configuration ``stored``, without a None for the quantization that it has.

    Only for a model: then ``AutoModel`` wants the unused arguments back, or ``pipeline`` sets its flag in ``asked``. A
    program that loads a configuration alone may mean the None.
    """
    for_a_model = asked.get("return_unused_kwargs") or asked.get("_from_pipeline")
    if for_a_model and kwargs.get(_KEY, "") is None and _of_bitsandbytes(stored.get(_KEY)):
        return {name: value for name, value in kwargs.items() if name != _KEY}
    return kwargs


def _of_bitsandbytes(quantization: Any) -> bool:
    if not isinstance(quantization, dict):
        return False
    return quantization.get("quant_method") == "bitsandbytes" or any(
        quantization.get(how)
        for how in ("load_in_4bit", "load_in_8bit")  # written before there was a method
    )


def defect() -> Finding:
    """Save a tiny Llama in INT8, and load it with ``quantization_config=None`` and without it."""
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    ids = torch.arange(8)[None]
    load = AutoModelForCausalLM.from_pretrained
    with tempfile.TemporaryDirectory() as packed, torch.no_grad():
        save_quantized(packed, tiny_models.make_llama(), BitsAndBytesConfig(load_in_8bit=True), device_map="cpu")
        try:
            loaded = load(packed, quantization_config=None, device_map="cpu")
        except AttributeError as error:
            if "'NoneType' object has no attribute" not in str(error):
                raise
            return Finding(True, str(error))
        expected = load(packed, device_map="cpu")(ids).logits
        logits = loaded(ids).logits
    layer = type(loaded.model.layers[0].mlp.up_proj).__name__
    # NaN is equal to NaN here: on 0.46 the packed weights of a float16 model lose their scales, which other patches repair.
    if torch.allclose(logits, expected, rtol=0, atol=0, equal_nan=True):
        return Finding(False, f"loaded into {layer}, the same logits")
    off = ((logits - expected).norm() / expected.norm()).item()
    return Finding(True, f"loaded into {layer}, logits off by {off:.2f} of their norm")


PATCH = Patch(
    id="transformers-quantization-config-none",
    summary="quantization_config=None silently loads INT8 packed weights as plain weights; a 4-bit checkpoint raises an error",
    groups=("save", "layers"),
    silent=True,
    links=(
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/models/auto/auto_factory.py#L340",
        "https://github.com/huggingface/trl/blob/main/trl/scripts/sft.py",
    ),
    why="""
        Training scripts write ``quantization_config=bnb_config if use_4bit else None``, and load checkpoints that are
        already quantized with None. The ``AutoModel`` classes write this None into the configuration, over the
        quantization configuration of the checkpoint, and build the model from plain layers. An INT8 checkpoint is
        silently loaded into them, and every output is wrong. A 4-bit checkpoint raises an error about shapes.
        ``LlamaForCausalLM`` and other classes of models are right, as are the ``AutoModel`` classes without the
        argument. TRL's own scripts leave it out for this reason ("Passing None would not be treated the same as
        omitting the argument"). This happens on 5.12 and 5.23; on older releases (seen on 4.57 to 5.10) checkpoints of
        both kinds raise ``'NoneType' object has no attribute 'get'``, or ``'to_dict'``. The same error comes from
        ``pipeline(model_kwargs={"quantization_config": None})`` there, and from classes that come with a checkpoint
        (``trust_remote_code=True``).
    """,
    repair="""
        With the repair, None means the same as leaving the argument out, for a checkpoint of bitsandbytes. For any
        other it keeps its meaning: a checkpoint of BitNet, for example, may hold plain weights beside its
        configuration.
    """,
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=(
        Rewrite(
            "transformers.models.auto.configuration_auto:AutoConfig.from_pretrained",
            find="config_class.from_dict(config_dict, **unused_kwargs)",
            replace="config_class.from_dict(config_dict, **_patches_without_none(config_dict, unused_kwargs, kwargs))",
            names={"_patches_without_none": without_none},
        ),
        Rewrite(  # a class that comes with the checkpoint (trust_remote_code=True)
            "transformers.models.auto.configuration_auto:AutoConfig.from_pretrained",
            find="config_class.from_pretrained(pretrained_model_name_or_path, **kwargs)",
            replace="""
                config_class.from_pretrained(
                    pretrained_model_name_or_path, **_patches_without_none(config_dict, kwargs, kwargs)
                )
            """,
        ),
    ),
    defect=defect,
)
