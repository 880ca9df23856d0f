"""Reading experts: packed weights of a checkpoint that has them matrix by matrix, or floating point to be quantized.

transformers 4 kept each expert as linear layers, so its 4-bit checkpoints name each matrix:
``experts.3.gate_proj.weight``, ``experts.3.gate_proj.weight.absmax`` and so on. transformers 5 says by a ``WeightConverter``
which of them make up one parameter. The converters here take their place and make ``QuantizedExperts`` of packed weights.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..config.quantizers import names_precision
from ..process.messages import LOGGER
from . import experts_on_disk, gpt_oss_layout
from .checkpoint_matrices import (
    STATISTICS,
    check_kinds,
    check_shapes,
    make_parameter,
    read_matrices,
    statistic_name,
    to_dense_matrix,
)
from .experts_in_model import ExpertParameter, find_experts, has_packed_experts, makes_parameter, matrices_per_expert_of
from .products import register_transformers_operators
from .quantize import QuantizationConfig, is_to_be_quantized, quantize_experts_by_matrix, reason_for_none
from .tensor import as_parameter

_STATISTIC_OF_AN_EXPERT = re.compile(r"experts\.\w+_proj\.\d+\.(weight\.absmax|SCB)$")


def converters(mapping: list[Any], model: Any, load_config: Any, keys: Any, asked: bool) -> list[Any]:
    """Add converters for quantized experts to ``mapping``, if the checkpoint has them or if they are ``asked`` for.

    ``keys`` are the names of the tensors in the checkpoint.
    """
    quantizer = load_config.hf_quantizer
    if not names_precision(quantizer):
        return mapping
    packed = quantizer.pre_quantized and has_packed_experts(keys)
    asked = asked and not packed  # a checkpoint with packed experts is read as it is
    if not packed and not asked:
        return mapping
    found = [one for one in find_experts(model) if packed or is_to_be_quantized(one.full_name, quantizer)]
    experts_on_disk.refuse_if_not_offloadable(found, load_config)
    if not found:
        _refuse_divided_experts(keys)
        if asked:
            LOGGER.warning("quantize_experts changed nothing: %s.", reason_for_none(model))
        return mapping
    register_transformers_operators()
    transposed = gpt_oss_layout.has_gpt_oss_layout(keys)
    if transposed:
        mapping = [*gpt_oss_layout.bias_converters(found), *mapping]
    return _replaced(
        mapping, found, ReadOptions(QuantizationConfig.from_config(quantizer.quantization_config), asked, transposed)
    )


def _refuse_divided_experts(keys: Any) -> None:
    """Raise an error if transformers has made linear layers of the experts, as it does to load a quantized Llama 4."""
    for key in filter(_STATISTIC_OF_AN_EXPERT.search, keys):
        raise NotImplementedError(
            f"this checkpoint has {key}, but transformers has made linear layers of the experts. The patch "
            "transformers-skip-list-of-checkpoint prevents that: call patches.apply() before the model is loaded."
        )


class ReadOptions(NamedTuple):
    """How to read experts. ``asked``: quantize experts in floating point by ``config``; else they stay as they are.

    ``transposed``: the checkpoint has each matrix as (out, in), the parameter is (experts, in, out).
    """

    config: QuantizationConfig
    asked: bool
    transposed: bool

    def config_for(self, name: str, model: Any) -> QuantizationConfig:
        """Return how the parameter ``name`` is quantized."""
        return self.config.for_module(model.get_submodule(name.rpartition(".")[0]))

    def quantized(self, experts: Any, name: str, model: Any) -> Any:
        """Make the parameter ``name`` of experts, each a sequence of its matrices."""
        return as_parameter(
            quantize_experts_by_matrix(experts, self.config_for(name, model)), model.get_parameter(name).dtype
        )

    def quantized_whole(self, experts: torch.Tensor, name: str, model: Any) -> Any:
        """Make the parameter ``name`` of all experts in one tensor, each one matrix."""
        whole = experts.to(model.get_parameter(name).dtype)
        return self.quantized(((expert,) for expert in whole.unbind(0)), name, model)


def _replaced(mapping: list[Any], found: list[ExpertParameter], reading: ReadOptions) -> list[Any]:
    """Put our converters in the place of the ones that make the parameters ``found``, and before all others."""
    left = {one.full_name for one in found}
    result = []
    for each in mapping:
        names = {name for name in left if isinstance(each, WeightConverter) and makes_parameter(each, name)}
        if names and matrices_per_expert_of(each):
            each = ExpertsConverter.of(each, names, reading)
            left -= names
        elif names and reading.asked:  # made otherwise: quantized once it is made
            each = QuantizedWhenMade.of(each, names, reading)
        result.append(each)
    whole = [ExpertsConverter.without_predecessor(suffix, names, reading) for suffix, names in _by_suffix(left).items()]
    return [*whole, *result]  # before the ones that take any "weight"


def _by_suffix(names: set[str]) -> dict[str, set[str]]:
    """Group names of parameters by the part that follows the number of their layer."""
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(re.split(r"\.\d+\.", name)[-1], set()).add(name)
    return found


class ExpertsConverter(WeightConverter):  # type: ignore[misc]
    """Makes one parameter of experts of the tensors of a checkpoint, packed or in floating point.

    ``before``: the converter whose place it has taken; None if there was none.
    """

    before: Any

    @classmethod
    def of(cls, before: Any, names: set[str], reading: ReadOptions) -> ExpertsConverter:
        """Make one in the place of ``before``, which makes the parameters ``names``."""
        sources, targets = _patterns(before)
        self = cls(_with_statistics(sources), targets, operations=[MakeExperts(names, reading, before)])
        self.before = before
        _scope(self, before)
        return self

    @classmethod
    def without_predecessor(cls, suffix: str, names: set[str], reading: ReadOptions) -> ExpertsConverter:
        """Make one for parameters that no converter makes: stored whole, or, as we save them, one expert a tensor."""
        source = gpt_oss_layout.matrix_name(suffix) if reading.transposed else suffix
        sources = [*_with_statistics([f"{source}.*.weight"]), f"{suffix}$"]
        self = cls(sources, suffix, operations=[MakeExperts(names, reading, None)])
        self.before = None
        return self

    def reverse_transform(self) -> Any:
        """Return the converter that gives the names for saving; ``.saving`` takes packed weights apart."""
        if self.before is not None:
            return self.before.reverse_transform()
        target = _patterns(self)[1][0]
        return WeightConverter(target, target, operations=[_AsItIs()])

    def convert(self, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        for operation in self.operations:
            operation.keys = sorted(self.layer_targets.get(layer_name, ()))
        return super().convert(layer_name, *args, **kwargs)


def _patterns(converter: Any) -> tuple[list[str], list[str]]:
    """Return sources and targets as they were given; transformers before 5.1 keeps them rewritten alone."""
    return tuple(  # type: ignore[return-value]
        list(getattr(converter, f"_original_{side}_patterns", getattr(converter, f"{side}_patterns")))
        for side in ("source", "target")
    )


def _scope(converter: Any, before: Any) -> None:
    """Restrict ``converter`` to the part of the model that ``before`` is for, where transformers has such parts."""
    for name in ("scope_prefix", "base_model_prefix"):
        if hasattr(before, name):
            setattr(converter, name, getattr(before, name))


def _with_statistics(sources: list[str]) -> list[str]:
    statistics = [f"{statistic_name(source, name)}$" for source in sources for name in STATISTICS]
    return [*statistics, *(f"{source}$" for source in sources)]


class _AsItIs(ConversionOps):  # type: ignore[misc]
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return input_dict

    @property
    def reverse_op(self) -> _AsItIs:
        return self


class QuantizedWhenMade(WeightConverter):  # type: ignore[misc]
    """A converter of transformers that makes experts otherwise (interleaved, transposed), and quantizes them then."""

    before: Any

    @classmethod
    def of(cls, before: Any, names: set[str], reading: ReadOptions) -> QuantizedWhenMade:
        options = {"force_cpu": before.force_cpu} if hasattr(before, "force_cpu") else {}
        self = cls(*_patterns(before), operations=before.operations, **options)
        _scope(self, before)
        self.before, self.quantization_operation = before, QuantizeMade(names, reading)
        return self

    def reverse_transform(self) -> Any:
        return self.before.reverse_transform()


class QuantizeMade(ConversionOps):  # type: ignore[misc]
    """Quantizes what a converter of transformers has made of other tensors, an interleaved ``gate_up_proj`` say."""

    def __init__(self, names: set[str], reading: ReadOptions) -> None:
        self.names, self.reading = names, reading

    def convert(self, input_dict: dict[str, Any], model: Any = None, **kwargs: Any) -> dict[str, Any]:
        made = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {n: self.reading.quantized_whole(v, n, model) if n in self.names else v for n, v in made.items()}


class MakeExperts(ConversionOps):  # type: ignore[misc]
    """The operation of an :class:`ExpertsConverter` on the tensors of one parameter."""

    reads_as_stored = True  # for transformers-checkpoint-keeps-dtype: rounding to bfloat16 would change statistics

    def __init__(self, names: set[str], reading: ReadOptions, before: Any) -> None:
        self.names, self.reading, self.before, self.keys = names, reading, before, list[str]()

    @property
    def hf_quantizer(self) -> Any:
        """Tell transformers to cast nothing of a quantized checkpoint: packed weights and statistics are no weights."""
        return self

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        target = model.get_parameter(full_layer_name)
        tensors = {key.removesuffix("$"): value for key, value in input_dict.items()}
        whole = [key for key in tensors if "*" not in key]
        if whole:  # the checkpoint has the parameter in one piece
            value = tensors[whole[0]][0]
            asked = self.reading.asked
            made = self.reading.quantized_whole(value, full_layer_name, model) if asked else value.to(target.dtype)
            return {full_layer_name: made}
        sources = [key for key in tensors if key.endswith(".weight")]
        matrices = {
            source: read_matrices(source, tensors, target) for source in self._ordered(sources, full_layer_name)
        }
        self._check_counts(full_layer_name, matrices, target)
        packed = [isinstance(one, tuple) for group in matrices.values() for one in group]
        if all(packed):
            check_kinds(full_layer_name, matrices)
            config, groups = self.reading.config_for(full_layer_name, model), list(matrices.values())
            return {full_layer_name: make_parameter(full_layer_name, groups, target, config, self.reading.transposed)}
        if any(packed):
            LOGGER.warning(
                "%s: %d of %d matrices are packed in the checkpoint and the others are not; the parameter is kept in "
                "floating point.",
                full_layer_name,
                sum(packed),
                len(packed),
            )
        return {full_layer_name: self._floating(matrices, full_layer_name, target, model, kwargs)}

    def _ordered(self, sources: list[str], name: str) -> list[str]:
        """Return ``sources`` in the order of the converter: gate before up."""
        if self.before is None:
            return sources
        named = [source.removesuffix("$") for source in self.before.source_patterns]
        missing = [source for source in named if source not in sources]
        if missing:
            raise ValueError(f"{name}: the checkpoint has no {missing[0]}")
        return named

    def _check_counts(self, name: str, matrices: dict[str, list[Any]], target: Any) -> None:
        for source, group in matrices.items():
            if len(group) > target.shape[0]:
                raise ValueError(
                    f"{name}: the checkpoint has {len(group)} experts of {source}, the model {target.shape[0]}"
                )
            numbered = re.compile(source.replace(".", r"\.").replace(r"*\.", r"(\d+)\.") + "$")
            numbers = {int(number) for key in self.keys for number in numbered.findall(key)}
            missing = sorted(set(range(target.shape[0])) - numbers)
            if len(group) < target.shape[0] or (numbers and missing):
                raise ValueError(
                    f"{name}: the checkpoint has {target.shape[0] - len(missing)} of {target.shape[0]} experts of {source}; "
                    f"missing: {missing}"
                )

    def _floating(self, matrices: dict[str, list[Any]], name: str, target: Any, model: Any, kwargs: Any) -> Any:
        floating = {source: [to_dense_matrix(one, target.dtype) for one in group] for source, group in matrices.items()}
        check_shapes(name, floating)
        if self.reading.asked and name in self.names:
            return self.reading.quantized(zip(*floating.values()), name, model)
        if self.before is None:
            stack = torch.stack(next(iter(floating.values())))
            return stack.mT.contiguous() if self.reading.transposed else stack
        result: Any = {p: floating[p.removesuffix("$")] for p in self.before.source_patterns}
        known = {"source_patterns": self.before.source_patterns, "target_patterns": self.before.target_patterns}
        for operation in self.before.operations:
            result = operation.convert(result, full_layer_name=name, model=model, **{**kwargs, **known})
        return next(iter(result.values()))
