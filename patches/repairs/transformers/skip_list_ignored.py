"""A layer that ``llm_int8_skip_modules`` names is quantized anyway, silently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...config import quantizers, skip_list, skip_names
from ...engine import Finding, Patch
from ..reproducers import tiny_models
from ..reproducers.quantized_models import load_quantized

if TYPE_CHECKING:
    from torch.nn import Module


def names_to_skip(quantizer: Any, model: Module) -> list[str] | None:
    """Return the names that transformers is given in place of the user's names."""
    asked: list[str] | None = quantizer.quantization_config.llm_int8_skip_modules
    if asked is None or quantizer.pre_quantized:
        return asked
    names, paths = skip_list.checked_skip_list(asked), skip_list.find_linear_layers(model)
    skip_names.warn_of_unknown(_RULE, names, model, paths)
    skip = skip_names.names_for(_RULE, names, paths)
    if skip == names:
        return asked
    skip_list.set_list(quantizer, skip)
    return skip


def _next_number(name: str, path: str, meant: list[str]) -> bool:
    """Tell whether ``path`` begins with ``name`` in the middle of a number: layers.1 and layers.10, up to 5.17."""
    return name[-1:].isdigit() and path.startswith(name) and path[len(name) :][:1].isdigit()


_RULE = skip_names.Rule(skip_list.skips_layer, _next_number)


def defect() -> Finding:
    """Load a tiny Llava in 4 bits without its vision tower, and a Llama without the projections of its attention."""
    from transformers import BitsAndBytesConfig

    quantized = {}
    for plain, name in ((tiny_models.make_llava(), "vision_tower"), (tiny_models.make_llama(), "self_attn.q_proj")):
        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=[name])
        model = load_quantized(plain, how, device_map="cpu")
        layers = [m for path, m in model.named_modules() if skip_list.path_up_to(path, name)]
        quantized[name] = sum(type(m).__name__ == "Linear4bit" for m in layers)
    figure = ", ".join(f"{count} layers quantized for {name!r}" for name, count in quantized.items())
    return Finding(any(quantized.values()), figure)


PATCH = Patch(
    id="transformers-skip-list-ignored",
    summary="llm_int8_skip_modules=['vision_tower'] is silently ignored: the vision tower is quantized",
    groups=("from_pretrained",),
    silent=True,
    links=(
        "https://github.com/fpgaminer/joycaption/issues/53",
        "https://github.com/unslothai/unsloth/issues/4208",
    ),
    why="""
        On transformers 4, ``llm_int8_skip_modules=["vision_tower"]``, ``["mlp"]`` and ``["layers.1"]`` leave those
        parts of a model unquantized: a name matches anywhere in the path of a layer. transformers 5 looks only at
        the beginning and the end of the path. The vision tower of a Llava is at ``model.vision_tower``, so it is
        quantized, as is everything that tutorials and model cards exclude by a middle part of a path (transformers
        5.0 to 5.23; JoyCaption #53, unsloth #4208). transformers 4 ignores ``"self_attn.q_proj"``, which is neither
        a whole path nor followed by a dot. Up to 5.17, ``"model.layers.1"`` also skips ``model.layers.10``.
    """,
    repair="""
        With the repair a name skips every layer whose path contains it, compared by components: "layers.1" is not
        "layers.10". Whatever the installed transformers skips, by a regular expression or the end of a path, is skipped
        as before. Paths that transformers alone would not find are added to the configuration of the model, so that a
        saved model loads without the plugin. If a name matches no module, a warning names the nearest ones. A value
        that is not a list, and an empty name, raise an error. For a checkpoint that is already quantized, its file
        decides (``transformers-skip-list-of-checkpoint``).
    """,
    cost="""
        One pass over the names of the modules while loading.
    """,
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=quantizers.rewrite_both_quantizers(
        quantizers.BEFORE_LOADING,
        find="self.quantization_config.llm_int8_skip_modules",
        replace="_patches_names_to_skip(self, model)",
        function=names_to_skip,
    ),
    defect=defect,
)
