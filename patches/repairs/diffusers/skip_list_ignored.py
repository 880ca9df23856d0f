"""``llm_int8_skip_modules`` of an image model skips other layers than it names, and loading writes to the user's list."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ...config import skip_list, skip_names
from ...config.quantizers import BEFORE_LOADING, QUANTIZERS_OF_DIFFUSERS
from ...engine import Finding, Patch, Rewrite
from ..reproducers import image_models

if TYPE_CHECKING:
    from torch.nn import Module


def names_to_skip(quantizer: Any, model: Any) -> list[str] | None:
    """Return the names that diffusers is given in place of the user's names: a list of the model's own configuration."""
    import torch

    asked = quantizer.quantization_config.llm_int8_skip_modules
    if asked is None:
        return None
    names = list(asked)
    if not quantizer.pre_quantized:
        names = skip_list.checked_skip_list(asked)
        paths = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        skip_names.warn_of_unknown(_RULE, names, model, paths)
        names = skip_names.names_for(_RULE, names, paths)
    config = copy.copy(quantizer.quantization_config)
    config.llm_int8_skip_modules = names  # to which diffusers adds what the class of the model keeps in float32
    quantizer.quantization_config = config
    if "quantization_config" in model.config:  # what is saved
        OrderedDict.__setitem__(model.config, "quantization_config", config)
    return names


def _in_middle(name: str, path: str, meant: list[str]) -> bool:
    """Tell whether ``name``, which is the name of other modules, is only a piece of the text of ``path``."""
    return bool(meant) and not skip_list.path_contains(path, name)


_RULE = skip_names.Rule(skip_list.skips_by_text, _in_middle)


def defect() -> Finding:
    """Quantize a tiny FLUX without its double blocks, and without the query projections."""
    import tempfile

    said, wrong = [], False
    how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    with tempfile.TemporaryDirectory() as folder:
        image_models.save_flux(folder)
        everywhere = _quantized(image_models.load_flux(folder, **how))
        for name in ("transformer_blocks", "attn.to_q"):
            names = [name]
            model = image_models.load_flux(folder, **how, llm_int8_skip_modules=names)
            skipped = everywhere - _quantized(model)
            asked = {path for path in everywhere if skip_list.path_contains(path, name)}
            wrong = wrong or skipped != asked or names != [name]
            said.append(f"{name!r} names {len(asked)} layers, {len(skipped)} are not quantized")
    return Finding(wrong, "; ".join(said))


def _quantized(model: Module) -> set[str]:
    return {path for path, module in model.named_modules() if type(module).__name__ == "Linear4bit"}


PATCH = Patch(
    id="diffusers-skip-list-ignored",
    summary="llm_int8_skip_modules of an image model silently skips other layers than it names",
    groups=("from_pretrained",),
    silent=True,
    links=("https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/quantizers/bitsandbytes/utils.py",),
    why="""
        diffusers looks for a name followed by a dot anywhere in the text of a path. So
        ``llm_int8_skip_modules=["transformer_blocks"]`` for FLUX also skips all ``single_transformer_blocks``: nothing
        but the embeddings is quantized, and the model takes three times the memory. ``["attn.to_q"]``, which is neither
        a whole path nor followed by a dot, is ignored. Neither case gives a message.

        Loading also extends the list that the user passed, by the modules that the class of the model keeps in
        float32 and by those that the device map has on the CPU. If another model is loaded with the same
        ``BitsAndBytesConfig``, it leaves those unquantized too: a FLUX that is loaded after a Wan keeps the linear
        layers of ``norm1``. All releases.
    """,
    repair="""
        A name skips every layer whose path contains it, compared by components, as with transformers
        (``transformers-skip-list-ignored``). A name that is a part of a path but not the name of a module skips the
        same layers as before. The model gets its own copy of the configuration. It contains the paths that diffusers
        alone would not skip, so that the saved model loads without the plugin, and the modules that diffusers adds. The
        configuration object that was passed is not changed. A name that matches no module gives a warning with the
        nearest names, and an empty name raises an error. A checkpoint that is already quantized is loaded by its own
        list.
    """,
    cost="""
        One pass over the names of the modules while loading.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=tuple(
        Rewrite(
            f"{quantizer}.{BEFORE_LOADING}",
            find="self.modules_to_not_convert = self.quantization_config.llm_int8_skip_modules",
            replace="self.modules_to_not_convert = _patches_names_to_skip(self, model)",
            names={"_patches_names_to_skip": names_to_skip},
        )
        for quantizer in QUANTIZERS_OF_DIFFUSERS
    ),
    defect=defect,
)
