"""gpt-oss in 4 bits as unsloth writes it: each expert is linear layers, whose matrices the parameter has transposed.

``experts.gate_up_projs.3.weight`` has a row for what comes out, and ``experts.gate_up_proj[3]`` a column. Packed weights stay
as they are: the parameter shows them transposed. Biases and the router lie under other names as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .experts_in_model import ExpertParameter

_WEIGHT = re.compile(r"experts\.\w+_projs\.\d+\.weight\.absmax$")


def has_gpt_oss_layout(keys: Iterable[str]) -> bool:
    """Tell whether a checkpoint with the tensors ``keys`` has its experts in this layout."""
    return any(map(_WEIGHT.search, keys))


def matrix_name(parameter: str) -> str:
    """Return the name of the matrices of ``parameter``, before their number."""
    return f"{parameter}s"


def bias_converters(found: list[ExpertParameter]) -> list[Any]:
    """Make converters for the biases of the experts, and for the router."""
    from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming

    names = {one.name for one in found if f"{one.name}_bias" in one.module._parameters and one.name.endswith("_proj")}
    made: list[Any] = [WeightRenaming("mlp.router.linear.", "mlp.router.")]
    for name in sorted(names):
        sources = [f"experts.{matrix_name(name)}.*.bias"]
        made.append(WeightConverter(sources, f"experts.{name}_bias", operations=[MergeModulelist(dim=0)]))
    return made
