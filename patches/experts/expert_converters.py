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

from ..config.quantizers import is_bitsandbytes
from ..process.messages import LOGGER
from . import experts_on_disk, gpt_oss_layout, unsupported_checkpoints
from .checkpoint_matrices import (
    INT8,
    STATISTICS,
    check_kinds,
    check_shapes,
    make_parameter,
    read_matrices,
    statistic_name,
    to_dense_matrix,
)
from .experts_in_model import ExpertParameter, count_stacked_matrices, find_experts, has_packed_experts, makes_parameter
from .products import register_transformers_operators
from .quantize import QuantizationConfig, is_to_be_quantized, packed_matrices, reason_for_none
from .tensor import as_parameter


def converters(mapping: list[Any], model: Any, load_config: Any, keys: Any, asked: bool) -> list[Any]:
    """``mapping``, with converters for quantized experts where the checkpoint has them, or where they are asked for."""
    quantizer = load_config.hf_quantizer
    if not is_bitsandbytes(quantizer):
        return mapping
    packed = quantizer.pre_quantized and has_packed_experts(keys)
    asked = asked and not packed  # of a checkpoint with packed experts the file decides
    if not packed and not asked:
        return mapping
    found = [one for one in find_experts(model) if packed or is_to_be_quantized(one.full_name, quantizer)]
    experts_on_disk.refuse_if_not_offloadable(found, load_config)
    if not found:
        unsupported_checkpoints.refuse_divided_experts(keys)
        if asked:
            LOGGER.warning("quantize_experts changed nothing: %s.", reason_for_none(model))
        return mapping
    register_transformers_operators()
    if gpt_oss_layout.has_gpt_oss_layout(keys):
        mapping = [*gpt_oss_layout.bias_converters(found), *mapping]
    return _replaced(
        mapping,
        found,
        Reading(
            QuantizationConfig.said_by(quantizer.quantization_config), asked, gpt_oss_layout.has_gpt_oss_layout(keys)
        ),
    )


class Reading(NamedTuple):
    """How experts are read: as ``how`` says, and in floating point only if that is not ``asked`` to be quantized."""

    how: QuantizationConfig
    asked: bool
    transposed: bool
    """Whether the checkpoint has each matrix as the weight of a linear layer, and the parameter the other way round."""

    def quantized(self, experts: Any, name: str, model: Any, dtype: Any) -> Any:
        """The parameter ``name``, of its matrices."""
        return as_parameter(packed_matrices(experts, self.of(name, model)), dtype)

    def of(self, name: str, model: Any) -> QuantizationConfig:
        return self.how.of(model.get_submodule(name.rpartition(".")[0]))


def _replaced(mapping: list[Any], found: list[ExpertParameter], how: Reading) -> list[Any]:
    left = {one.full_name for one in found}
    result = []
    for each in mapping:
        names = {name for name in left if isinstance(each, WeightConverter) and makes_parameter(each, name)}
        if names and count_stacked_matrices(each):
            each = ExpertsConverter.of(each, names, how)
            left -= names
        elif names and how.asked:  # made otherwise: quantized once it is made
            each = QuantizedWhenMade.of(each, names, how)
        result.append(each)
    whole = [ExpertsConverter.of_one(suffix, names, how) for suffix, names in _by_suffix(left).items()]
    return [*whole, *result]  # before the ones that take any "weight"


def _by_suffix(names: set[str]) -> dict[str, set[str]]:
    """Parameters that no converter makes, by what follows the number of their layer."""
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(re.split(r"\.\d+\.", name)[-1], set()).add(name)
    return found


class ExpertsConverter(WeightConverter):  # type: ignore[misc]
    """Makes one parameter of experts of the tensors of a checkpoint, packed or in floating point."""

    before: Any
    """The converter whose place it has taken; None if there was none."""

    @classmethod
    def of(cls, before: Any, names: set[str], how: Reading) -> ExpertsConverter:
        """In place of ``before``, which makes the parameters ``names``."""
        sources, targets = _patterns(before)
        self = cls(_with_statistics(sources), targets, operations=[MakeExperts(names, how, before)])
        self.before = before
        _scope(self, before)
        return self

    @classmethod
    def of_one(cls, suffix: str, names: set[str], how: Reading) -> ExpertsConverter:
        """For parameters that a checkpoint has whole, or one expert after the other as we write them."""
        one = gpt_oss_layout.matrix_name(suffix) if how.transposed else suffix
        self = cls(
            [*_with_statistics([f"{one}.*.weight"]), f"{suffix}$"],
            suffix,
            operations=[MakeExperts(names, how, None)],
        )
        self.before = None
        return self

    def reverse_transform(self) -> Any:
        """For names: packed weights are taken apart by ``.saving``."""
        if self.before is not None:
            return self.before.reverse_transform()
        target = _patterns(self)[1][0]
        return WeightConverter(target, target, operations=[_AsItIs()])

    def convert(self, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        for operation in self.operations:
            operation.keys = sorted(self.layer_targets.get(layer_name, ()))
        return super().convert(layer_name, *args, **kwargs)


def _patterns(converter: Any) -> tuple[list[str], list[str]]:
    """Sources and targets as they were given; transformers before 5.1 has them as it changed them."""
    return tuple(  # type: ignore[return-value]
        list(getattr(converter, f"_original_{side}_patterns", getattr(converter, f"{side}_patterns")))
        for side in ("source", "target")
    )


def _scope(converter: Any, before: Any) -> None:
    """For the part of the model that ``before`` is for, where transformers has such parts."""
    for name in ("scope_prefix", "base_model_prefix"):
        if hasattr(before, name):
            setattr(converter, name, getattr(before, name))


def _with_statistics(sources: list[str]) -> list[str]:
    statistics = [f"{statistic_name(source, name)}$" for source in sources for name in (*STATISTICS, *INT8)]
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
    def of(cls, before: Any, names: set[str], how: Reading) -> QuantizedWhenMade:
        self = cls(
            *_patterns(before), operations=before.operations,
            **({"force_cpu": before.force_cpu} if hasattr(before, "force_cpu") else {}),
        )  # fmt: skip
        _scope(self, before)
        self.before, self.quantization_operation = before, QuantizeMade(names, how)
        return self

    def reverse_transform(self) -> Any:
        return self.before.reverse_transform()


class QuantizeMade(ConversionOps):  # type: ignore[misc]
    """Quantizes what a converter of transformers has made of other tensors, an interleaved ``gate_up_proj`` say."""

    def __init__(self, names: set[str], how: Reading) -> None:
        self.names, self.how = names, how

    def convert(self, input_dict: dict[str, Any], model: Any = None, **kwargs: Any) -> dict[str, Any]:
        return {name: self._made(name, value, model) for name, value in input_dict.items()}

    def _made(self, name: str, value: Any, model: Any) -> Any:
        whole = value[0] if isinstance(value, list) else value
        if name not in self.names:
            return whole
        dtype = model.get_parameter(name).dtype
        return self.how.quantized(((expert,) for expert in whole.to(dtype).unbind(0)), name, model, dtype)


class MakeExperts(ConversionOps):  # type: ignore[misc]
    """What an :class:`ExpertsConverter` does with the tensors of one parameter."""

    reads_as_stored = True
    """For ``transformers-checkpoint-keeps-dtype``: statistics in bfloat16 would be others."""

    def __init__(self, names: set[str], how: Reading, before: Any) -> None:
        self.names, self.how, self.before, self.keys = names, how, before, list[str]()

    @property
    def hf_quantizer(self) -> Any:
        """Tells transformers to cast nothing of a quantized checkpoint: packed weights and statistics are no weights."""
        return self

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        target = model.get_parameter(full_layer_name)
        tensors = {key.removesuffix("$"): value for key, value in input_dict.items()}
        whole = [key for key in tensors if "*" not in key]
        if whole:
            return {full_layer_name: self._whole(tensors[whole[0]], full_layer_name, target, model)}
        sources = [key for key in tensors if key.endswith(".weight")]
        matrices = {
            source: read_matrices(source, tensors, target) for source in self._ordered(sources, full_layer_name)
        }
        self._check_counts(full_layer_name, matrices, target)
        packed = [isinstance(one, tuple) for group in matrices.values() for one in group]
        if all(packed):
            check_kinds(full_layer_name, matrices)
            how, groups = self.how.of(full_layer_name, model), list(matrices.values())
            return {full_layer_name: make_parameter(full_layer_name, groups, target, how, self.how.transposed)}
        if any(packed):
            LOGGER.warning(
                "%s: %d of %d matrices are packed in the checkpoint and the others are not; the parameter is kept in "
                "floating point.", full_layer_name, sum(packed), len(packed),
            )  # fmt: skip
        return {full_layer_name: self._floating(matrices, full_layer_name, target, model, kwargs)}

    def _ordered(self, sources: list[str], name: str) -> list[str]:
        """As the converter names them: gate before up."""
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
            numbers = {int(n) for key in self.keys for n in re.findall(_numbered(source), key)}
            missing = sorted(set(range(target.shape[0])) - numbers)
            if len(group) < target.shape[0] or (numbers and missing):
                raise ValueError(
                    f"{name}: the checkpoint has {target.shape[0] - len(missing)} of {target.shape[0]} experts of {source}; "
                    f"missing: {missing}"
                )

    def _whole(self, tensors: list[Any], name: str, target: Any, model: Any) -> Any:
        """A parameter that the checkpoint has in one piece."""
        whole = tensors[0].to(target.dtype)
        if not self.how.asked:
            return whole
        return self.how.quantized(((expert,) for expert in whole.unbind(0)), name, model, target.dtype)

    def _floating(self, matrices: dict[str, list[Any]], name: str, target: Any, model: Any, kwargs: Any) -> Any:
        floating = {source: [to_dense_matrix(one, target.dtype) for one in group] for source, group in matrices.items()}
        check_shapes(name, floating)
        if self.how.asked and name in self.names:
            return self.how.quantized(zip(*floating.values()), name, model, target.dtype)
        if self.before is None:
            stack = torch.stack(next(iter(floating.values())))
            return stack.mT.contiguous() if self.how.transposed else stack
        result: Any = {p: floating[p.removesuffix("$")] for p in self.before.source_patterns}
        known = {"source_patterns": self.before.source_patterns, "target_patterns": self.before.target_patterns}
        for operation in self.before.operations:
            result = operation.convert(result, full_layer_name=name, model=model, **{**kwargs, **known})
        return next(iter(result.values()))


def _numbered(source: str) -> str:
    return source.replace(".", r"\.").replace(r"*\.", r"(\d+)\.") + "$"
