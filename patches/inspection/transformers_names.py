"""Read what transformers recorded about a model that it quantized: names that it left out, heads, the configuration."""

from __future__ import annotations

from typing import Any

from .tensors import Modules, imported_attribute

WRAPPED = ("_orig_mod", "module", "base_layer", "original_module")
"""Names that torch.compile, DDP and peft put between the names of the model."""


class Naming:
    """The model of transformers in a model, if there is one."""

    def __init__(self, modules: Modules, quantized: bool) -> None:
        models = [(name, module) for name, module in modules if hasattr(type(module), "get_output_embeddings")]
        prefix, outermost = models[0] if models else ("", None)
        self.model: Any = outermost
        self.prefix = _plain(prefix)
        attributes = vars(self.model) if self.model is not None else {}
        self.quantizer = attributes.get("hf_quantizer")
        self.config = _value(attributes.get("config"), "quantization_config")
        self.quantized = quantized or self.quantizer is not None
        self.heads = [head for _, m in models if (head := _head(m)) is not None]

    def is_head(self, module: Any) -> bool:
        return any(module is head for head in self.heads)

    def setting(self, name: str) -> Any:
        """Return a setting of the quantization configuration, which is an object or, from a file, a dict."""
        return _value(self.config, name)

    def skipped(self, name: str) -> str:
        """Say why a Linear of this name is not quantized."""
        if self.quantizer is None and self.config is None:
            return "not made as a quantized layer"
        short = _plain(name).removeprefix(f"{self.prefix}.")
        given = [*(self.setting("llm_int8_skip_modules") or ()), *(self.setting("modules_to_not_convert") or ())]
        kept = getattr(self.quantizer, "modules_to_not_convert", None) or ()
        if _matches(short, given):
            return "in the skip list (llm_int8_skip_modules)"
        if _matches(short, kept):
            return "left alone by transformers (tied, head, or kept in float32)"
        return "not in the skip list: added or replaced after loading"


def _head(model: Any) -> Any:
    try:
        head = model.get_output_embeddings()
    except Exception:  # noqa: BLE001  (some models have none, and say so in their own way)
        return None
    return getattr(head, "original_module", None) or getattr(head, "base_layer", None) or head


def _value(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def _matches(name: str, patterns: Any) -> bool:
    """Match as transformers does; before 5 it had no function for this, and looked for a part of the name."""
    if converts := imported_attribute("transformers.quantizers.quantizers_utils", "should_convert_module"):
        return not converts(name, list(patterns))
    return any(name == pattern or name.endswith(f".{pattern}") or f"{pattern}." in f"{name}." for pattern in patterns)
