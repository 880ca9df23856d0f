"""Each time that checkpointing is switched off and on again, the embedding gets one more hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...engine import Finding, Patch, Rewrite

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

CYCLES = 5

_handles_of_embedding: WeakKeyDictionary[torch.nn.Module, list[RemovableHandle]] = WeakKeyDictionary()


def defect() -> Finding:
    """Switch checkpointing off for a reference pass and on again, as trainers of preferences do in each step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    on = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    off = getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)
    on()
    for _ in range(CYCLES):
        off()
        on()
    hooks = len(model.get_input_embeddings()._forward_hooks)
    return Finding(hooks > 2, f"{hooks} hooks on the embedding after {CYCLES} times off and on")


def register_at_most_two(embedding: torch.nn.Module) -> Callable[[Callable[..., Any]], RemovableHandle]:
    """Return ``embedding.register_forward_hook``, which gives the handle of the last hook if there are two already."""

    def register(hook: Callable[..., Any]) -> RemovableHandle:
        kept = [h for h in _handles_of_embedding.get(embedding, ()) if h.id in embedding._forward_hooks]
        if len(kept) < 2:
            kept.append(embedding.register_forward_hook(hook))
        _handles_of_embedding[embedding] = kept
        return kept[-1]

    return register


PATCH = Patch(
    id="transformers-input-grads-hooks-pile-up",
    summary="each time that checkpointing is switched off and on again, the embedding gets one more hook",
    groups=("train", "compile"),
    silent=True,
    links=(
        "https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_utils.py",
        "https://github.com/huggingface/trl/blob/main/trl/models/utils.py",
    ),
    why="""
        ``activation_checkpointing_enable`` (``gradient_checkpointing_enable``) of transformers 5 calls
        ``enable_input_require_grads``, which registers a forward hook and loses the handle of the previous one.
        Switching checkpointing off does not remove it. TRL's DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer
        switch it off and on in every step, for a reference pass. After 10,000 steps the embedding calls 10,000
        hooks. With ``torch_compile=True`` each step is compiled again, because the number of hooks has changed,
        until Dynamo gives up.
    """,
    repair="""
        With the repair an embedding with two of these hooks gets no third. It keeps two, because
        ``disable_input_require_grads`` removes the last one, and a program that enabled it twice must keep one, as
        before. Ten of these hooks do the same as one.
    """,
    requires=("transformers>=5",),
    tested_up_to="5.24.0",
    edits=(
        Rewrite.to_call(
            "transformers.modeling_utils:PreTrainedModel.enable_input_require_grads",
            find="input_embeddings.register_forward_hook",
            function=register_at_most_two,
            arguments="input_embeddings",
        ),
    ),
    defect=defect,
)
