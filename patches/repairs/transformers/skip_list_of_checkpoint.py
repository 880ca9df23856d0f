"""A list of skipped modules from another release makes layers of a checkpoint what they are not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...config import skip_list
from ...config.quantizers import is_bitsandbytes
from ...engine import Finding, Patch, Rewrite
from ...loading import checkpoint_keys
from ..reproducers import tiny_models
from ..reproducers.quantized_models import save_quantized

_OF_ONE_EXPERT = re.compile(r"(?<=_proj)\.\d+\.weight$")  # experts.gate_up_proj.3.weight


def preprocess(
    quantizer: Any, files: Iterable[str] | None, state: Mapping[str, Any] | None, mapping: dict[str, str] | None
) -> Callable[..., Any]:
    """Return ``quantizer.preprocess_model``, after which each layer is quantized as far as the checkpoint has it so."""
    config = quantizer.quantization_config
    ours = quantizer.pre_quantized and is_bitsandbytes(quantizer)
    stored = checkpoint_keys.read_headers(files, state) if ours and not config.llm_int8_has_fp16_weight else None
    if stored is None:
        result: Callable[..., Any] = quantizer.preprocess_model
        return result

    def run(model: Any, **also: Any) -> Any:
        quantized = _quantized(model, stored, mapping)
        plain = {path: model.get_submodule(path) for path in skip_list.find_linear_layers(model)}
        stacked = _stacked(model, stored, mapping)
        result = quantizer.preprocess_model(model=model, **also)
        for path, module in plain.items():
            if path in quantized and not _is_quantized(model.get_submodule(path)):
                model.set_submodule(path, _make_quantized(module, config))
            elif path not in quantized and _is_quantized(model.get_submodule(path)):
                model.set_submodule(path, module)
        for path, module in stacked.items():
            model.set_submodule(path, module)
        quantizer.modules_to_not_convert = [path for path in plain if not _is_quantized(model.get_submodule(path))]
        return result

    return run


def _quantized(model: Any, stored: dict[str, checkpoint_keys.StoredTensor], mapping: dict[str, str] | None) -> set[str]:
    """Return the paths of the layers of ``model`` that are quantized in the checkpoint."""
    keys = list(stored)
    weights = set(checkpoint_keys.quantized_names(keys))
    paths = {path: model.get_submodule(path).weight for path in skip_list.find_linear_layers(model)}
    candidates = weights | {key for key in keys if key.endswith(".weight")}
    names = checkpoint_keys.names_in_model(model, keys, candidates, mapping)
    found = set()
    for weight, name in names.items():
        path = name.rpartition(".")[0]
        if path not in paths:
            continue
        here = stored.get(weight)
        if weight in weights and here is None:
            raise ValueError(
                f"The checkpoint has a quantization state for {path!r} but no weight ({weight!r}). A file may be "
                "missing: download the checkpoint again, or save the model again."
            )
        packed = here is not None and (not here.floating or here.shape != paths[path].shape and here.shape[1:] == (1,))
        if packed and weight not in weights:
            raise ValueError(
                f"The checkpoint has packed weights for {path!r} but no quantization state ({weight!r}), and they "
                "cannot be read without it. A file may be missing: download the checkpoint again, or save the model again."
            )
        if weight in weights:
            found.add(path)
    return found


def _stacked(
    model: Any, stored: dict[str, checkpoint_keys.StoredTensor], mapping: dict[str, str] | None
) -> dict[str, Any]:
    """Return the modules of experts that the checkpoint has in parameters of three dimensions; transformers divides some."""
    paths = {
        f"{path}.{name}": path
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dim() == 3
    }
    ends = tuple({name.rpartition(".")[2] for name in paths})
    # quantize_experts stores each expert by itself, also of a model whose checkpoints have experts whole.
    whole = {
        _OF_ONE_EXPERT.sub("", key)
        for key, tensor in stored.items()
        if len(tensor.shape) == 3 or _OF_ONE_EXPERT.search(key)
    }
    keys = sorted(key for key in whole if ends and key.endswith(ends))
    names = checkpoint_keys.names_in_model(model, list(stored), keys, mapping) if keys else {}
    found = {paths[name] for name in names.values() if name in paths}
    return {path: model.get_submodule(path) for path in sorted(found)}


def _is_quantized(module: Any) -> bool:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    return isinstance(module, (Linear4bit, Linear8bitLt))


def _make_quantized(module: Any, config: Any) -> Any:
    """Make the layer that transformers makes of ``module``."""
    import inspect

    import torch
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    config = copy.copy(config)
    config.llm_int8_skip_modules = None
    holder = torch.nn.Module()
    holder.add_module("layer", module)
    also = {"pre_quantized": True} if "pre_quantized" in inspect.signature(replace_with_bnb_linear).parameters else {}
    replace_with_bnb_linear(holder, modules_to_not_convert=[], quantization_config=config, **also)
    return holder.layer


def defect() -> Finding:
    """Load a tiny Llava with a layer that is not quantized, whose list is written as transformers 4.49 wrote it."""
    import json
    import tempfile
    from pathlib import Path

    from transformers import BitsAndBytesConfig, LlavaForConditionalGeneration

    list_now = ["model.vision_tower", "model.multi_modal_projector", "lm_head", "model.language_model.layers.0.mlp"]
    list_then = ["vision_tower", "multi_modal_projector", "lm_head", "language_model.model.layers.0.mlp"]
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=list_now)
    with tempfile.TemporaryDirectory() as packed:
        save_quantized(packed, tiny_models.make_llava(), how, device_map="cpu")
        file = Path(packed, "config.json")
        stored = json.loads(file.read_text())
        stored["quantization_config"]["llm_int8_skip_modules"] = list_then
        file.write_text(json.dumps(stored))
        try:
            model = LlavaForConditionalGeneration.from_pretrained(packed, device_map="cpu")
        except (ValueError, NotImplementedError) as error:
            return Finding(True, f"while loading: {error}")
    layers = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    lost = sum(getattr(layer.weight, "quant_state", None) is None for layer in layers)
    return Finding(lost > 0, f"{lost} of {len(layers)} Linear4bit without a quantization state")


PATCH = Patch(
    id="transformers-skip-list-of-checkpoint",
    former_ids=("transformers-checkpoint-decides",),
    summary="layers that a 4-bit checkpoint stores in 16 bits become Linear4bit without a quantization state",
    groups=("from_pretrained", "save"),
    silent=True,
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/quantizers/base.py#L190",),
    why="""
        Which layers of a quantized checkpoint are quantized is read from ``llm_int8_skip_modules`` in its
        configuration, not from its tensors. The "dynamic" 4-bit vision models of the Hub list names of transformers 4
        (``language_model.model.layers.0.mlp``, today ``model.language_model.layers.0.mlp``). Layers that the checkpoint
        has in 16 bits become ``Linear4bit`` without a quantization state, and their forward raises an
        ``AssertionError``. With ``bitsandbytes-linear4bit-plain-weight`` the layer computes, but peft raises
        ``'Parameter' object has no attribute 'compress_statistics'``. The opposite happens too: if the checkpoint was
        saved by a release that ignored the list, another release takes its quantized layers for plain ones. Seen on
        transformers 4.53 to 5.23.
    """,
    repair="""
        With the repair the file decides: a layer whose quantization state is in the checkpoint is quantized, any
        other is a plain layer. The repair reads the headers of the files, no tensor. If a checkpoint holds packed
        weights without their quantization state, or a quantization state without a weight, an error names the
        layer. If list and file agree, nothing changes.
    """,
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=(
        Rewrite.to_call(
            "transformers.modeling_utils:PreTrainedModel.from_pretrained",
            find="hf_quantizer.preprocess_model",
            function=preprocess,
            arguments="hf_quantizer, checkpoint_files, state_dict, key_mapping",
        ),
    ),
    defect=defect,
)
