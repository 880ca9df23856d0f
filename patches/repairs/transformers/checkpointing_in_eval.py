"""Gradient checkpointing silently does nothing while the base model is in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from ...engine import Finding, Patch, Rewrite, SetAttribute
from ...process.messages import LOGGER
from ..reproducers.log_records import record_logs

_told: WeakSet[Any] = WeakSet()


def in_training(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return ``layer.training`` to a ``layer`` for which checkpointing is on; warn by its arguments if it does nothing."""
    import torch

    training: bool = layer.training
    if not training and not torch.compiler.is_compiling():
        _warn(layer, args, kwargs)
    return training


def _make(original: None) -> Callable[..., Any]:
    import torch

    inherited = torch.nn.Module.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and not self.training:
            in_training(self, args, kwargs)
        return inherited(self, *args, **kwargs)

    return __call__


def _warn(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    import torch

    enabled_by = getattr(layer, "_gradient_checkpointing_func", type(layer))
    wanted = torch.is_grad_enabled() and any(getattr(a, "requires_grad", False) for a in (*args, *kwargs.values()))
    if not wanted or enabled_by in _told:
        return
    _told.add(enabled_by)
    LOGGER.warning(
        "gradient checkpointing is enabled but does nothing: %s is in eval mode while gradients are wanted. "
        "Call model.train() before the training loop.",
        type(layer).__name__,
    )


def defect() -> Finding:
    """Run a tiny Llama as loaded, with LoRA on it and checkpointing on."""
    import peft
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=2, **size)).eval()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.enable_input_require_grads()
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with record_logs() as messages, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        tuned(input_ids=torch.arange(4).view(1, 4))
    idle = tuned.training and not any(layer.training for layer in model.model.layers)
    return Finding(idle and not messages, f"{len(kept)} tensors kept for backward, {len(messages)} warnings")


_CALL = "transformers.modeling_layers:GradientCheckpointingLayer.__call__"

PATCH = Patch(
    id="transformers-checkpointing-in-eval",
    summary="gradient checkpointing silently does nothing while the base model is in eval mode",
    groups=("train",),
    silent=True,
    words=("OOM (out of memory)",),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        ``from_pretrained`` returns a model in eval mode, and checkpointing layers look at their own ``training``.
        After ``prepare_model_for_kbit_training`` and ``get_peft_model``, ``peft_model.training`` is True, but
        ``training`` of the layers below is False. So every layer keeps all its activations, without a message. The
        Trainer calls ``train()``; hand-written training loops run out of memory (bitsandbytes #1927 suspects the
        order of calls). All releases of transformers that have ``GradientCheckpointingLayer``.
    """,
    repair="""
        The repair warns if such a layer runs while gradients are needed, once for each time that checkpointing was
        enabled. It changes no result, because a model may be in eval mode on purpose. It does not warn while
        compiling.
    """,
    requires=("transformers>=4.53", "peft"),
    tested_up_to="5.24.0",
    edits=(
        Rewrite.to_call(_CALL, "self.training", in_training, "self, args, kwargs", "transformers<5.23"),
        # Later layers checkpoint in ``forward``, and have no ``__call__`` of their own.
        SetAttribute(_CALL, make=_make, when="transformers>=5.23"),
    ),
    defect=defect,
)
