"""``quantization_config=None`` loads the packed weights of a checkpoint as if they were plain weights."""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, Rewrite

_KEY = "quantization_config"


def without_none(stored: dict[str, Any], kwargs: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` for the configuration ``stored``, without a None for the quantization that it has.

    ``AutoModel`` asks for what the configuration does not use, and ``pipeline`` says so in what was ``asked``; who asks for
    a configuration alone may mean the None.
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
    """A tiny Llama saved in INT8, loaded with ``quantization_config=None`` and without it."""
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = torch.arange(8)[None]
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as codes, torch.no_grad():
        LlamaForCausalLM(LlamaConfig(vocab_size=8, **size)).save_pretrained(plain)
        how = BitsAndBytesConfig(load_in_8bit=True)
        LlamaForCausalLM.from_pretrained(plain, quantization_config=how, device_map="cpu").save_pretrained(codes)
        try:
            loaded = AutoModelForCausalLM.from_pretrained(codes, quantization_config=None, device_map="cpu")
        except AttributeError as error:
            if "'NoneType' object has no attribute" not in str(error):
                raise
            return Finding(True, str(error))
        expected = AutoModelForCausalLM.from_pretrained(codes, device_map="cpu")(ids).logits
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
        Training scripts write ``quantization_config=bnb_config if use_4bit else None``, and load checkpoints that
        are already quantized with None. The ``AutoModel`` classes write this None into the configuration, over the
        quantization configuration of the checkpoint, and build the model from plain layers. An INT8 checkpoint is
        silently loaded into them, and every output is wrong. A 4-bit checkpoint raises an error about shapes.
        ``LlamaForCausalLM`` and other classes of models are right, as are the ``AutoModel`` classes without the
        argument. TRL's own scripts leave it out for this reason ("Passing None would not be treated the same as
        omitting the argument"). So on 5.12 and 5.23; on older releases (seen on 4.57 to 5.10) both kinds raise
        ``'NoneType' object has no attribute 'get'``, or ``'to_dict'``. The same error comes from
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
