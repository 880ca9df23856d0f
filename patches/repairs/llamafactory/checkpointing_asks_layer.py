"""LLaMA-Factory's checkpointing splits the compiled train step at every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...adapters.input_grads import tie_to_graph
from ...engine import Finding, Message, Patch, Rewrite
from ...process import tracing
from ..reproducers.graphs import show_graphs

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
    return show_graphs(lambda ids: model(ids, labels=ids).loss, ids)


def bound_call(layer: torch.nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, the ``super().__call__`` of a checkpointed ``layer``, as a method whose ``__self__`` Dynamo knows."""
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
    """Return ``args`` with ``hidden`` requiring grad: in place in eager, as a new tensor while compiling."""
    if not tracing.for_this_process():
        hidden.requires_grad_(True)
        return args
    new = tie_to_graph(hidden)
    return args if new is None else tuple(new if arg is hidden else arg for arg in args)


PATCH = Patch(
    id="llamafactory-checkpointing-asks-layer",
    summary="torch.compile splits the train step at every layer that LLaMA-Factory checkpoints",
    groups=("compile", "train"),
    messages=(
        Message(
            "Dynamo does not know how to trace method `parameters` of class `<unknown type>`",
            "torch/_dynamo/variables/base.py",
            parts=("Dynamo does not know how to trace method `parameters`",),
            holds=("Dynamo does not know how to trace method `", "` of class `"),
        ),
    ),
    words=("graph break",),
    links=("https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/model/model_utils/checkpointing.py",),
    why="""
        LLaMA-Factory wraps ``torch.utils.checkpoint`` in a function of its own, in every train run without
        ``disable_gradient_checkpointing``. This function asks the layer whether any of its parameters is trained,
        and makes the hidden states require grad. With ``torch_compile: true`` Dynamo can trace neither:

        - the layer is ``func.func.__self__``, where ``func`` is ``partial(super().__call__, **kwargs)`` from
          transformers' ``GradientCheckpointingLayer``. Dynamo can call ``super().__call__``, but knows nothing else
          about it: "does not know how to trace method ``parameters``";
        - ``arg.requires_grad_(True)`` changes a tensor that leaves the graph.

        With ``fullgraph=True`` this raises an error. Without it a 4-bit Llama of two layers becomes 5 graphs, and
        the frames of peft and of the model run in eager, so that other repairs for compilation have no effect.
        Releases from 0.9.4, which pass layers as such a ``partial``; also without quantization.
    """,
    repair="""
        While compiling, the repair gives the partial the layer's ``_wrapped_call_impl``, which is what
        ``nn.Module.__call__`` is, bound to the layer: the same call, but with a ``__self__`` that Dynamo knows. A
        layer with another ``super().__call__`` keeps it. The hidden states are tied to an anchor, as
        ``transformers-input-grads-hook`` does at the embedding. The values stay the same, and a reentrant
        checkpoint, LLaMA-Factory's default, gets an input that requires grad even if the graph ends before it.
        Eager steps run the original lines. A model that was loaded before the patch was applied keeps its function.
    """,
    requires=("llamafactory>=0.9.4", "transformers>=4.53,<5.23", "torch>=2.7"),
    tested_up_to="0.9.5",
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
