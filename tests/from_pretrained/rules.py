"""The rules of docs/from_pretrained.md, written once more: what is wrong with a model that was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .programs import Loaded, Program

QUANTIZED = ("Linear4bit", "Linear8bitLt")
ROUNDING = {"nf4": 5e-2, "int8": 1e-1}
"""How far outputs may be from those of the rounded weights: products in 16 bits, and INT8 activations."""


def broken(program: Program, loaded: Loaded) -> list[str]:
    """Each rule that ``loaded`` does not keep, in words."""
    return [
        *_skipped(program, loaded),
        *_tied(loaded),
        *_as_saved(loaded),
        *_dtypes(program, loaded),
        *_computes(program, loaded),
    ]


def layers(model: Any) -> dict[str, Any]:
    """Layers that are linear in the original or quantized, by path."""
    return {path: m for path, m in model.named_modules() if type(m).__name__ in (*QUANTIZED, "Linear", "Conv1D")}


def quantized(model: Any) -> set[str]:
    return {path for path, module in layers(model).items() if type(module).__name__ in QUANTIZED}


def contains(path: str, name: str) -> bool:
    """Whether the components of ``name`` stand in ``path``, one after the other."""
    parts, wanted = path.split("."), name.split(".")
    return any(parts[at : at + len(wanted)] == wanted for at in range(len(parts) - len(wanted) + 1))


def _skipped(program: Program, loaded: Loaded) -> Iterator[str]:
    """Rule 1, and that the rest is quantized."""
    kept = {"lm_head", "proj_out", "embed_out"}
    last = next(reversed(list(loaded.original.state_dict()))).rpartition(".")[0]
    for path in layers(loaded.original):
        named = program.skip is not None and contains(path, program.skip)
        if named and path in quantized(loaded.model):
            yield f"1: {path} is quantized"
        # Heads, what a class keeps in float32 (T5: wo), and without a list the last module.
        free = path.rpartition(".")[2] in {*kept, "wo"} or program.skip is None and path == last
        if not named and not free and path not in quantized(loaded.model):
            yield f"1: {path} is not quantized"


def _tied(loaded: Loaded) -> Iterator[str]:
    """Rule 2."""
    head, before = loaded.model.get_output_embeddings(), loaded.original.get_output_embeddings()
    if before is None or before.weight is not loaded.original.get_input_embeddings().weight:
        return
    if type(head) is not torch.nn.Linear:
        yield f"2: the tied head is {type(head).__name__}"
    elif head.weight is not loaded.model.get_input_embeddings().weight:
        yield "2: the head is not tied"


def _as_saved(loaded: Loaded) -> Iterator[str]:
    """Rule 3."""
    if loaded.saved is None:
        return
    for path in quantized(loaded.model) ^ quantized(loaded.saved):
        yield f"3: {path} is not what the file holds"
    for path in quantized(loaded.model) & quantized(loaded.saved):
        one, other = (model.get_submodule(path).weight for model in (loaded.model, loaded.saved))
        if one.dtype != other.dtype or not torch.equal(one.data, other.data):
            yield f"3: {path} holds other packed weights"


def _dtypes(program: Program, loaded: Loaded) -> Iterator[str]:
    """Rule 4: as the model that is not quantized has them, but for what its class keeps in float32."""
    kept = loaded.model._keep_in_fp32_modules or ()
    own = dict(loaded.original.named_parameters())
    packed = {f"{path}.weight" for path in quantized(loaded.model)}
    for name, parameter in loaded.model.named_parameters():
        if parameter.dtype == torch.float32 and any(contains(name, each) for each in kept):
            continue
        if name not in packed and name in own and parameter.dtype != own[name].dtype:
            yield f"4: {name} is {parameter.dtype}, asked for {own[name].dtype}"
    for name in packed:
        state = getattr(loaded.model.get_parameter(name), "quant_state", None)
        if state is not None and state.dtype != getattr(torch, program.dtype):
            yield f"4: {name} is dequantized in {state.dtype}"


def _computes(program: Program, loaded: Loaded) -> Iterator[str]:
    """Outputs are those of the original with the weights that the packed ones stand for."""
    try:
        rounded = _rounded(loaded)
        outputs, expected = _logits(loaded.model), _logits(rounded)
    except Exception as error:  # noqa: BLE001  (whatever a user would get)
        yield f"computes: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return
    off = ((outputs - expected).norm() / expected.norm()).item()
    if not off < ROUNDING[program.how]:
        yield f"computes: off by {off:.1e}"


def _rounded(loaded: Loaded) -> Any:
    import bitsandbytes

    original = loaded.original.float()
    for path in quantized(loaded.model):
        layer, plain = loaded.model.get_submodule(path), original.get_submodule(path)
        if type(layer).__name__ == "Linear4bit":
            weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
        else:
            scales = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
            weight = layer.weight.data.float() * scales.float().view(-1, 1) / 127
        plain.weight.data = weight.t().contiguous() if type(plain).__name__ == "Conv1D" else weight
    return original


def _logits(model: Any) -> torch.Tensor:
    ids = torch.arange(2, 10)[None]
    given: dict[str, Any] = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    if model.config.model_type == "whisper":
        torch.manual_seed(0)
        given["input_features"] = torch.randn(1, 8, 32).to(model.dtype)
    else:
        given["input_ids"] = ids
    with torch.no_grad():
        return model(**given).logits.float()
