"""Which parameters of a model are experts, and of which matrices each expert is made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


_OF_AN_EXPERT = re.compile(r"\.\d+\.(?:\w+\.)?(weight\.absmax|SCB)$")
"""``experts.3.gate_proj.weight.absmax``, or ``gate_up_proj.3.weight.absmax``."""


def has_packed_experts(keys: Iterable[str]) -> bool:
    """Tell whether a checkpoint with the tensors ``keys`` has the statistics of single experts."""
    return any(map(_OF_AN_EXPERT.search, keys))


class ExpertParameter(NamedTuple):
    """A parameter of ``module`` that holds the experts of one layer."""

    module: torch.nn.Module
    module_path: str
    name: str

    @property
    def full_name(self) -> str:
        return f"{self.module_path}.{self.name}" if self.module_path else self.name

    @property
    def parameter(self) -> torch.nn.Parameter:
        found: torch.nn.Parameter = self.module._parameters[self.name]  # type: ignore[assignment]
        return found


def _parameters(path: str, module: torch.nn.Module) -> Iterator[ExpertParameter]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield ExpertParameter(module, path, name)


def find_experts(model: torch.nn.Module) -> Iterator[ExpertParameter]:
    """Find parameters that stack a matrix for each expert (3-D), in modules that are named or treated as experts."""
    for path, module in model.named_modules():
        if _is_experts(path, module):
            yield from (one for one in _parameters(path, module) if _stacks_matrices(one.parameter))


def find_row_concatenated_experts(model: torch.nn.Module) -> Iterator[ExpertParameter]:
    """Find experts that cannot be quantized: the matrices of all, one below the other in one parameter (DBRX)."""
    for path, module in model.named_modules():
        if holds_row_concatenated_experts(module):
            yield from _parameters(path, module)


def holds_row_concatenated_experts(module: Any) -> bool:
    """Tell whether ``module`` holds all experts in parameters of two dimensions; a single expert is made of layers."""
    own = [one.parameter for one in _parameters("", module)]
    return "Expert" in type(module).__name__ and bool(own) and all(p.dim() == 2 and min(p.shape) > 1 for p in own)


def is_expert_parameter(model: torch.nn.Module, name: str, parameter: torch.Tensor) -> bool:
    """Tell whether :func:`find_experts` finds the parameter ``name`` of ``model``."""
    path = name.rpartition(".")[0]
    return _stacks_matrices(parameter) and _is_experts(path, model.get_submodule(path))


def _stacks_matrices(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 3 and min(parameter.shape) > 1 and parameter.is_floating_point()


def _is_experts(path: str, module: Any) -> bool:
    from torch.nn.modules.conv import _ConvNd

    if isinstance(module, _ConvNd):
        return False
    named = "expert" in path.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower()
    return named or (hasattr(module, "is_transposed") and hasattr(module, "has_gate"))  # use_experts_implementation


def weight_converters(model: Any) -> list[Any]:
    """Return the converters by which transformers merges the tensors of a checkpoint into parameters of ``model``."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if not hasattr(model, "config") or not hasattr(model, "base_model_prefix"):
        return []
    return [each for each in get_model_conversion_mapping(model, add_legacy=False) if isinstance(each, WeightConverter)]


def matrices_per_expert_of(converter: Any) -> int:
    """Return of how many matrices, one below the other, ``converter`` makes each expert; 0 if it makes it otherwise."""
    operations = [type(operation).__name__ for operation in converter.operations]
    dims = [getattr(operation, "dim", None) for operation in converter.operations]
    sources = len(converter.source_patterns)
    if len(converter.target_patterns) != 1 or not all("*" in source for source in converter.source_patterns):
        return 0
    if operations == ["MergeModulelist"] and dims == [0] and sources == 1:
        return 1
    return sources if operations == ["MergeModulelist", "Concatenate"] and dims == [0, 1] else 0


def makes_parameter(converter: Any, name: str) -> bool:
    """Tell whether ``converter`` makes the parameter ``name``; a converter whose target is just "weight" does not count."""
    targets = [target.removeprefix("^").removesuffix("$") for target in converter.target_patterns]
    return any(name.endswith(target) for target in targets if target != "weight")


def matrices_per_expert(name: str, converters: list[Any]) -> int:
    """Return of how many matrices, one below the other, a checkpoint makes each expert of the parameter ``name``."""
    return next(
        (matrices_per_expert_of(converter) or 1 for converter in converters if makes_parameter(converter, name)), 1
    )
