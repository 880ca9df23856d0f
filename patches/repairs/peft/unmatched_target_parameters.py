"""A name in ``target_parameters`` that matches no parameter is silently ignored if another name matches."""

from __future__ import annotations

import warnings
from typing import Any

from ...engine import Finding, Patch, Rewrite


def defect() -> Finding:
    """Put LoRA on two parameters of experts, one of them misspelled, and look for a warning."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = torch.nn.Sequential()
    experts: Any = torch.nn.Module()
    experts.gate_up_proj, experts.down_proj = (torch.nn.Parameter(torch.randn(2, 4, 4)) for _ in range(2))
    model.add_module("experts", experts)
    names = ["experts.gate_up_proj", "experts.down_projs"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=names))
    found = [str(warning.message) for warning in said if "down_projs" in str(warning.message)]
    return Finding(not found, f"{len(found)} warnings name experts.down_projs, which nothing matches")


def looked(targets: Any, model: Any) -> Any:
    """Return ``targets``; warn of the ones that ``model`` does not have, if it has others."""
    parameters = {_own_name(name): parameter for name, parameter in model.named_parameters()}
    missing = [t for t in sorted(targets) if not any(name == t or name.endswith(f".{t}") for name in parameters)]
    if missing and len(missing) < len(targets):
        ends = {".".join(n.split(".")[-3:]) for n, p in parameters.items() if p.dim() == 3}
        there = f"Its parameters of three dimensions end in: {', '.join(sorted(ends))}" if ends else "It has no experts"
        warnings.warn(
            f"target_parameters: no parameter of this model matches {', '.join(map(repr, missing))}, so nothing is "
            f"trained there. {there}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return targets


def _own_name(name: str) -> str:
    """Return the name of a parameter without the parts that peft and ``torch.nn.utils.parametrize`` put into it."""
    before, found, after = name.replace(".base_layer", "").partition("parametrizations.")
    return before + after.rpartition(".")[0] if found else before


PATCH = Patch(
    id="peft-unmatched-target-parameters",
    effect="warns",
    summary="a name in target_parameters that matches no parameter is silently ignored",
    groups=("experts", "train"),
    silent=True,
    links=("https://github.com/huggingface/peft/blob/main/src/peft/tuners/tuners_utils.py",),
    why="""
        ``LoraConfig(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])`` trains the
        parameters that it finds and leaves the rest frozen, for example on a mixture whose experts have other names
        (``w1``, ``experts.up_proj``), or with a typing error. peft warns only if no name matches. The training loss
        falls, and half of the adapter is missing. All releases of peft from 0.17 on.
    """,
    repair="""
        With the repair a warning lists the names without a match, and the parameters of three dimensions that the
        model has.
    """,
    requires=("peft>=0.17",),
    tested_up_to="0.21.2",
    edits=(
        Rewrite.to_call(
            "peft.tuners.tuners_utils:BaseTuner._inject_parameters",
            "set(peft_config.target_parameters)",
            looked,
            "set(peft_config.target_parameters), model",
        ),
    ),
    defect=defect,
)
