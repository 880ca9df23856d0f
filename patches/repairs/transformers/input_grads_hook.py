"""torch.compile splits the model at the hook that makes the embedding's output require grad."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...adapters.input_grads import require_grads
from ...engine import Finding, Message, Part, Patch, Rewrite
from ..reproducers.graphs import show_graphs

if TYPE_CHECKING:
    import torch


def defect_transformers() -> Finding:
    """Compile a checkpointed model whose embedding has the hook of transformers."""
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.linear(x)
            return output

    class Model(PreTrainedModel):  # type: ignore[misc]
        config_class = PretrainedConfig
        supports_gradient_checkpointing = True

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.embed_tokens = nn.Embedding(4, 4).requires_grad_(False)
            self.layer = Layer()
            self.post_init()

        def get_input_embeddings(self) -> nn.Module:
            return self.embed_tokens

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.layer(self.embed_tokens(ids))
            return output.sum()

    model = Model(PretrainedConfig()).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    return show_graphs(model, torch.arange(4))


def defect_peft() -> Finding:
    """Compile a checkpointed model whose embedding has the hook of peft."""
    import torch
    from peft import prepare_model_for_kbit_training
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        is_loaded_in_4bit = True

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 4)
            self.layer = nn.Linear(4, 4)

        def get_input_embeddings(self) -> nn.Module:
            return self.embedding

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
            pass

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = checkpoint(self.layer, self.embedding(ids), use_reentrant=True)
            return output

    model = prepare_model_for_kbit_training(Model())
    model.layer.requires_grad_(True)
    return show_graphs(lambda ids: model(ids).sum(), torch.arange(4))


HOOK: dict[str, Any] = {
    "find": "output.requires_grad_(True)",
    "replace": "return _patches_require_grads(output)",
    "names": {"_patches_require_grads": require_grads},
}


PATCH = Patch(
    id="transformers-input-grads-hook",
    summary="torch.compile splits the model at the hook that makes the embedding's output require grad",
    groups=("compile",),
    messages=(
        Message(
            "An intermediate tensor with requires_grad_() called on it (or a tensor derived from it) is returned from the compiled region.",
            "torch/_dynamo/variables/tensor.py",
            parts=("An intermediate tensor with requires_grad_() called on it",),
        ),
        Message("Unsupported Tensor.requires_grad_() call", "torch/_dynamo/variables/tensor.py"),
    ),
    words=("graph break",),
    links=(
        "https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_utils.py",
        "https://github.com/huggingface/peft/blob/main/src/peft/utils/other.py",
    ),
    why="""
        torch.compile splits the model at the hook that makes the embedding's output require grad.
        ``enable_input_require_grads`` registers a hook that calls ``output.requires_grad_(True)`` on the output of
        the embedding, so that reentrant checkpoints have an input that requires grad. peft's
        ``prepare_model_for_kbit_training`` and the Trainer call it. Dynamo cannot trace a change of
        ``requires_grad`` on a tensor that leaves the graph. A 4-bit Llama of 3 layers becomes 3 graphs with 5
        breaks, and with ``fullgraph=True`` it is an error. All releases.

        torch.compile splits the model at peft's hook that makes the embedding's output require grad.
        ``prepare_model_for_kbit_training``, ``PeftModel`` and ``PeftMixedModel`` register a hook that calls
        ``output.requires_grad_(True)`` on models that have ``get_input_embeddings`` but not transformers'
        ``enable_input_require_grads``, such as a user's own models. Cause and repair are the same. All releases.
    """,
    repair="""
        While compiling, the hook ties the output to an anchor that requires grad, with an operator that returns its
        input unchanged. The values stay the same, and the output requires grad as before. (Leaving the hook out
        instead would lose gradients if a graph ends between the embedding and a reentrant checkpoint.) Eager calls
        run the original line. Only hooks that are registered while the patch is applied are repaired; they stay
        valid after it is reverted.
    """,
    former_ids=("peft-input-grads-hook",),
    parts=(
        Part(
            "transformers",
            ("transformers>=4.53", "torch>=2.7"),
            "5.24.0",
            (Rewrite("transformers.modeling_utils:PreTrainedModel.enable_input_require_grads", **HOOK),),
            defect_transformers,
        ),
        Part(
            "peft",
            ("peft>=0.14", "torch>=2.7"),
            "0.21.2",
            (
                Rewrite("peft.utils.other:prepare_model_for_kbit_training", **HOOK),
                Rewrite("peft.peft_model:PeftModel._prepare_model_for_gradient_checkpointing", **HOOK),
                Rewrite("peft.mixed_model:_prepare_model_for_gradient_checkpointing", **HOOK),
            ),
            defect_peft,
        ),
    ),
)
