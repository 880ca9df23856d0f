"""Which linear layers a name of ``llm_int8_skip_modules`` is about, and writing more names to a configuration."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module


def find_linear_layers(model: Module) -> list[str]:
    """Return the paths of the layers of ``model`` that bitsandbytes may quantize."""
    import torch
    from transformers.pytorch_utils import Conv1D

    return [path for path, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))]


def path_up_to(path: str, name: str) -> str:
    """Return ``path`` up to the components that are ``name``; empty if they are not in it."""
    around = f".{path}."
    at = around.find(f".{name.strip('.')}.")
    return "" if at < 0 else around[1 : at + len(name.strip(".")) + 1]


def path_contains(path: str, name: str) -> bool:
    """Tell whether the components that are ``name`` are in ``path``."""
    return path_up_to(path, name) != ""


def skips_layer(name: str, path: str) -> bool:
    """Tell whether the installed transformers leaves the layer at ``path`` as it is for ``name``."""
    try:
        from transformers.quantizers.quantizers_utils import should_convert_module
    except ImportError:  # transformers 4
        return skips_by_text(name, path)
    try:
        return not should_convert_module(path, [name])
    except re.error as error:
        raise ValueError(
            f"llm_int8_skip_modules contains {name!r}, which is not a regular expression: {error}. Give the path of a "
            'module, such as "model.layers.0.mlp", or some of its components, such as "layers.0.mlp" or "mlp".'
        ) from None


def skips_by_text(name: str, path: str) -> bool:
    """Tell whether diffusers and transformers 4 leave the layer at ``path`` as it is for ``name``: they search the text."""
    return name in (path, path.rpartition(".")[2]) or f"{name}." in path


def checked_skip_list(names: Any) -> list[str]:
    """Return ``names`` as a list; raise if it is no list of names."""
    if not isinstance(names, (list, tuple, set, frozenset)):
        raise TypeError(
            f"llm_int8_skip_modules must be a list of names of modules, got {type(names).__name__}: {names!r}. "
            f'Write llm_int8_skip_modules=["{names}"].'
        )
    for name in names:
        if not isinstance(name, str) or not name.strip("."):
            raise ValueError(
                f"llm_int8_skip_modules contains {name!r}, which names no module. Remove it, or give the path of a "
                'module, such as "model.layers.0.mlp", or some of its components, such as "layers.0.mlp" or "mlp".'
            )
    return list(names)


def also_skip(quantizer: Any, names: Iterable[str]) -> None:
    """Add ``names`` to the list of the configuration that the model is saved with."""
    set_list(quantizer, [*(quantizer.quantization_config.llm_int8_skip_modules or ()), *names])


def set_list(quantizer: Any, names: Iterable[str]) -> None:
    """Make ``names`` the list of the configuration that the model is saved with, a copy of the user's object."""
    config = copy.copy(quantizer.quantization_config)
    config.llm_int8_skip_modules = list(dict.fromkeys(names))
    quantizer.quantization_config = config
