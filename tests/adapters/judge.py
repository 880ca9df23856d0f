"""What differs between an adapter on a quantized layer and the same one on the ``nn.Linear`` that it stands for."""

from __future__ import annotations

import re

import torch

from tests.adapters.subject import Asked
from tests.adapters.trials import Outcome

STEPS = ("made", "train", "load", "merge")
REFUSED = re.compile(
    r"(Linear4bit|Linear8bitLt)\W.*(Call dequantize\(\)|without quantization_config|norms of the model|does not support this layer)",
    re.DOTALL,
)
"""An error that is no fault: it names the layer and says what works."""

KNOWN = {
    r"^HiraConfig\(rank_pattern.* has shape": "nn.Linear ignores rank_pattern of HiRA",
    r"^AdaLoraConfig.* does not train .*ranknum": "a count, which peft casts to the dtype of an nn.Linear and trains",
    r"^(AdaLora|Frod|Hira)Config.* (int8|nf4) .*own dtype.* is torch.float32": "these layers compute in float32, whatever their adapter has",
    r"^(AdaLora|IA3|Pvera|RandLora|Road|Vera)Config.* flagged .*the output is torch.float32": "peft's layer returns float32",
    r"^OSFConfig.* int8 .*float16 .* is torch.float32": "peft 0.18 gives factors the dtype of the weight, here the dequantized one",
    r"^DeloraConfig.* nf4-stored .*gradient of .*delora_lambda": "peft before 0.19 rounds its norms to the dtype of the storage",
    r"^PveraConfig.* flagged .*shapes cannot be multiplied": "peft 0.19 has no PVeRA for models that say that they are quantized",
    r"^TinyLoraConfig\(init_weights=False\)": "peft leaves the values uninitialized",
    r"^(Frod|OSF|Supertuning)Config.* int8 (bfloat16|float16) .*(gradient|trained)": (
        "they factor or sort the weight, which an nn.Linear rounds to 16 bits before"
    ),
    r"^LoraConfig\(init_lora_weights='olora'\).* (start|trained):": "peft quantizes again what OLoRA leaves of the weight, by design",
}
"""Differences that stay, by trial and text, with the reason."""


def differences(asked: Asked, found: Outcome, reference: Outcome) -> list[str]:
    """In words; an error is none if the reference has one at that step too."""
    said: list[str] = []
    if "made" in reference.errors:
        return [] if "made" in found.errors else [f"accepts what nn.Linear refuses ({reference.errors['made']})"]
    for step in STEPS:
        if step in found.errors and step not in reference.errors and not REFUSED.search(found.errors[step]):
            said.append(f"{step}: {found.errors[step]}")
    if "made" in found.errors:
        return said
    said += _of_parameters(found, reference)
    if found.dtype != reference.dtype:
        said.append(f"the output is {found.dtype}, of nn.Linear {reference.dtype}")
    tolerance = 0.03 if asked.kind == "int8" or asked.dtype != torch.float32 else 1e-3
    moved, expected = (_error(o.start, o.base) for o in (found, reference))
    if abs(moved - expected) > max(0.01, 3 * tolerance, 0.3 * expected):
        said.append(f"start: moves the output by {moved:.1e}, nn.Linear by {expected:.1e}")
    comparable = {n: v[0] for n, v in found.trained.items()} == {n: v[0] for n, v in reference.trained.items()}
    if comparable and not {"train"} & (found.errors.keys() | reference.errors.keys()):
        for name, gradient in reference.gradients.items():
            if name not in found.gradients:
                said.append(f"no gradient for {name}")
            elif (error := _error(found.gradients[name], gradient)) > 5 * tolerance:
                said.append(f"gradient of {name}: {error:.1e} off")
        if reference.after is not None and (error := _error(found.after, reference.after)) > 3 * tolerance:
            said.append(f"trained: {error:.1e} off")
    if reference.loaded is not None and found.loaded is not None and found.after is not None:
        own, theirs = _error(found.loaded, found.after), _error(reference.loaded, reference.after)
        if own > max(tolerance, 2 * theirs):
            said.append(f"loaded: {own:.1e} off")
    if reference.merged is not None and found.merged is not None and found.after is not None:
        own, theirs = _error(found.merged, found.after), _error(reference.merged, reference.after)
        if own > max(0.15, 2 * theirs):
            said.append(f"merged: {own:.1e} off, nn.Linear {theirs:.1e}")
    return said


def unknown(name: str, said: list[str]) -> list[str]:
    """Those of the differences ``said`` of the trial ``name`` that are not in ``KNOWN``."""
    return [text for text in said if not any(re.search(pattern, f"{name}: {text}") for pattern in KNOWN)]


def _of_parameters(found: Outcome, reference: Outcome) -> list[str]:
    said = []
    names, expected = set(found.trained), set(reference.trained)
    if missing := sorted(expected - names):
        said.append(f"does not train {', '.join(missing)}")
    if more := sorted(names - expected):
        said.append(f"trains {', '.join(more)} too")
    for name in sorted(names & expected):
        if found.trained[name] != reference.trained[name]:
            (shape, dtype), (theirs, wanted) = found.trained[name], reference.trained[name]
            if shape != theirs:
                said.append(f"{name} has shape {shape}, nn.Linear {theirs}")
            if dtype != wanted:
                said.append(f"{name} is {dtype}, nn.Linear {wanted}")
    return said


def _error(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None:
        return float("inf")
    return float((a - b).norm() / b.norm().clamp_min(1e-12)) if a.isfinite().all() else float("inf")
