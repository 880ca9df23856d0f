"""One trial: an option, on a layer, seen as a user sees it: made, trained for a step, saved and loaded, merged."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any

import peft
import torch

from tests.adapters import subject
from tests.adapters.options import Option
from tests.adapters.subject import Asked


@dataclass
class Outcome:
    """What came of it; a step that raised an error has the error instead."""

    errors: dict[str, str] = field(default_factory=dict)
    """By step: "made", "train", "load", "merge"."""
    trained: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    """Shape and dtype of each parameter that is trained, by name."""
    adapter: dict[str, torch.Tensor] = field(default_factory=dict)
    """Its values at the start."""
    base: torch.Tensor | None = None
    start: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    """Of the output."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    after: torch.Tensor | None = None
    loaded: torch.Tensor | None = None
    merged: torch.Tensor | None = None


def name(option: Option, asked: Asked, autocast: bool) -> str:
    return f"{option} {asked} {'autocast' if autocast else 'own dtype'}"


def run(
    option: Option, asked: Asked, *, autocast: bool, plain: bool, adapter: dict[str, torch.Tensor] | None = None
) -> Outcome:
    """``adapter``: values to train on from, those of the reference."""
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = _made(option, asked, autocast, plain, outcome)
        except Exception as error:
            outcome.errors["made"] = f"{type(error).__name__}: {error}"
            return outcome
        for step in (_train, _load, _merge):
            try:
                step(model, option, asked, autocast, plain, outcome, adapter)
            except Exception as error:
                outcome.errors[step.__name__.strip("_")] = f"{type(error).__name__}: {error}"
    return outcome


def _base(asked: Asked, plain: bool) -> Any:
    return subject.plain(asked) if plain else subject.quantized(asked)


def _prepared(option: Option, asked: Asked, plain: bool) -> tuple[Any, Any]:
    """The base model and the configuration, after what the option asks to be done before."""
    base, config = _base(asked, plain), option.make()
    x = subject.batch(asked)
    if option.value == "corda":
        from peft.tuners.lora.corda import preprocess_corda

        config.corda_config = peft.tuners.lora.config.CordaConfig(corda_method="ipm")
        preprocess_corda(base, config, run_model=lambda: base(x))
    if option.value == "lora_ga":
        from peft.tuners.lora.loraga import preprocess_loraga

        preprocess_loraga(base, config, lambda: base(x).float().square().sum().backward())
    return base, config


def _made(option: Option, asked: Asked, autocast: bool, plain: bool, outcome: Outcome) -> Any:
    base, config = _prepared(option, asked, plain)
    x = subject.batch(asked)
    with torch.no_grad():
        outcome.base = _base(asked, plain)(x).float()
    torch.manual_seed(2)
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=autocast)
    model.eval()
    torch.manual_seed(3)
    with torch.no_grad():
        output = model(x)
    outcome.start, outcome.dtype = output.float(), output.dtype
    outcome.trained = {n: (tuple(p.shape), p.dtype) for n, p in model.named_parameters() if p.requires_grad}
    outcome.adapter = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    return model


def _train(
    model: Any, option: Option, asked: Asked, autocast: bool, plain: bool, outcome: Outcome, adapter: Any
) -> None:
    """The gradients at given values with some noise, and the output there."""
    with torch.no_grad():
        named = dict(model.named_parameters())
        torch.manual_seed(4)
        for name in sorted(outcome.adapter):
            source = (adapter or outcome.adapter).get(name)
            if source is not None and source.shape == named[name].shape:
                noise = torch.randn(named[name].shape) * 0.02
                named[name].copy_(source.to(named[name].dtype) + noise.to(named[name].dtype))
    model.train()
    torch.manual_seed(5)
    output = model(subject.batch(asked)).float()
    (output * torch.randn(output.shape)).sum().backward()
    outcome.gradients = {n: p.grad.float() for n, p in named.items() if p.grad is not None}
    model.eval()
    with torch.no_grad():
        torch.manual_seed(6)
        outcome.after = model(subject.batch(asked)).float()


def _load(
    model: Any, option: Option, asked: Asked, autocast: bool, plain: bool, outcome: Outcome, adapter: Any
) -> None:
    if option.value in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq"):
        return  # they change the base weight: what is saved belongs to the changed one
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = peft.PeftModel.from_pretrained(_base(asked, plain), folder, autocast_adapter_dtype=autocast).eval()
    with torch.no_grad():
        torch.manual_seed(6)
        outcome.loaded = again(subject.batch(asked)).float()


def _merge(
    model: Any, option: Option, asked: Asked, autocast: bool, plain: bool, outcome: Outcome, adapter: Any
) -> None:
    model.merge_adapter()
    with torch.no_grad():
        torch.manual_seed(6)
        outcome.merged = model(subject.batch(asked)).float()
