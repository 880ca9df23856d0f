"""LLaMA-Factory's checkpointing splits the compiled train step at every layer.

It puts a function of its own before ``torch.utils.checkpoint``, on for every train run unless
``disable_gradient_checkpointing`` is set. That one asks the layer whether any of its parameters trains, and makes
the hidden states require grad. With ``torch_compile: true`` Dynamo can trace neither:

- the layer is ``func.func.__self__``, and ``func`` is ``partial(super().__call__, **kwargs)``, made in
  ``GradientCheckpointingLayer`` of transformers. Dynamo knows what it is to call ``super().__call__``, and nothing
  else about it: "does not know how to trace method ``parameters``";
- ``arg.requires_grad_(True)`` on a tensor that leaves the graph.

With ``fullgraph=True`` that is an error; without it a tiny Llama of two layers in 4-bit is 5 graphs, and the frames of
peft and of the model fall to eager. Nothing else here reaches it, so all other repairs for compilation are in vain.
Releases from 0.9.4, whose layers are given as such a ``partial``; also without quantization.

While compiling, the partial holds the layer's ``_wrapped_call_impl``, which is what ``nn.Module.__call__`` is, bound
to the layer: the same call, and Dynamo knows its ``__self__``. A layer whose ``super().__call__`` is another one
keeps it. The hidden states are tied to an anchor, as at the embedding of ``transformers-input-grads-hook``: the values
are the same, and a reentrant checkpoint, LLaMA-Factory's default, gets an input that requires grad even where the
graph ends before it. Eager steps run the lines that they ran. A model that was loaded before the patch went in keeps
the function that it got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ..helpers.adapters.input_grads import tied
from ..helpers.process import tracing
from ..helpers.reproducers.graphs import in_pieces

if TYPE_CHECKING:
    import torch


def defect() -> Finding:
    import torch
    from llamafactory.hparams import ModelArguments
    from llamafactory.model.model_utils.checkpointing import prepare_model_for_training
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).train()
    model.model.embed_tokens.requires_grad_(False)  # as with LoRA
    prepare_model_for_training(model, ModelArguments(model_name_or_path="tiny"))  # what its load_model calls
    ids = torch.arange(8)[None]
    return in_pieces(lambda ids: model(ids, labels=ids).loss, ids)


def bound_call(layer: torch.nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, which is ``super().__call__`` of a checkpointed ``layer``, as one whose ``__self__`` Dynamo knows."""
    import torch
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not tracing.for_this_process():
        return call
    kinds = type(layer).__mro__
    inherited = kinds[kinds.index(GradientCheckpointingLayer) + 1 :]
    if next(kind for kind in inherited if "__call__" in kind.__dict__) is not torch.nn.Module:
        return call
    own: Callable[..., Any] = layer._wrapped_call_impl
    return own


def requiring_grad(args: tuple[Any, ...], hidden: torch.Tensor) -> tuple[Any, ...]:
    """``args`` of which ``hidden`` requires grad: in place in eager, as a new tensor while compiling."""
    if not tracing.for_this_process():
        hidden.requires_grad_(True)
        return args
    new = tied(hidden)
    return args if new is None else tuple(new if arg is hidden else arg for arg in args)


PATCH = Patch(
    id="llamafactory-checkpointing-asks-layer",
    summary="torch.compile splits the train step at every layer that LLaMA-Factory checkpoints",
    links=("https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/model/model_utils/checkpointing.py",),
    requires=("llamafactory>=0.9.4", "transformers>=4.53,<5.23", "torch>=2.7"),
    tested_up_to="0.9.5",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            "transformers.modeling_layers:GradientCheckpointingLayer.__call__",
            find="partial(super().__call__, **kwargs)",
            replace="partial(_patches_bound_call(self, super().__call__), **kwargs)",
            names={"_patches_bound_call": bound_call},
        ),
        Rewrite(
            "llamafactory.model.model_utils.checkpointing:get_custom_gradient_checkpointing_func",
            find="arg.requires_grad_(True)",
            replace="args = _patches_requiring_grad(args, arg)",
            names={"_patches_requiring_grad": requiring_grad},
        ),
    ),
    defect=defect,
)
