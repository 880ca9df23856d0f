"""torch.compile splits the model at peft's hook that makes the embedding's output require grad.

``prepare_model_for_kbit_training``, ``PeftModel`` and ``PeftMixedModel`` register a hook that calls
``output.requires_grad_(True)`` on models that have ``get_input_embeddings`` but not transformers'
``enable_input_require_grads``, such as a user's own models. Cause and repair are those of
``transformers-input-grads-hook``. All releases.
"""

from __future__ import annotations

from typing import Any

from ...adapters.input_grads import require_grads
from ...engine import Finding, Patch, Rewrite
from ..reproducers.graphs import show_graphs


def defect() -> Finding:
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
    id="peft-input-grads-hook",
    summary="torch.compile splits the model at peft's hook that makes the embedding's output require grad",
    links=("https://github.com/huggingface/peft/blob/main/src/peft/utils/other.py",),
    requires=("peft>=0.14", "torch>=2.7"),
    tested_up_to="0.21.2",
    seen_on=("2.8", "2.13", "2.14", "2.15"),
    edits=(
        Rewrite("peft.utils.other:prepare_model_for_kbit_training", **HOOK),
        Rewrite("peft.peft_model:PeftModel._prepare_model_for_gradient_checkpointing", **HOOK),
        Rewrite("peft.mixed_model:_prepare_model_for_gradient_checkpointing", **HOOK),
    ),
    defect=defect,
)
