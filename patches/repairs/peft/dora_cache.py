"""torch.compile cannot trace a checkpointed DoRA layer, because each call clears a cache."""

from __future__ import annotations

from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers.graphs import show_graphs


def defect() -> Finding:
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.utils.checkpoint import checkpoint

    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["0"], use_dora=True)).train()
    layer = model.base_model.model[0]

    def norm(x: torch.Tensor) -> torch.Tensor:
        """Compute the first thing that a DoRA layer computes, and the only one that touches its cache."""
        dora, A, B = (layer.lora_magnitude_vector["default"], layer.lora_A["default"], layer.lora_B["default"])
        size: torch.Tensor = dora.get_lora_weight(lora_A=A, lora_B=B, adapter_name="default").sum()
        return x * size

    return show_graphs(lambda x: checkpoint(norm, x.sin(), use_reentrant=False), torch.randn(2, 4))


PATCH = Patch(
    id="peft-dora-cache",
    summary="torch.compile cannot trace a checkpointed DoRA layer",
    groups=("compile",),
    messages=(
        Message(
            "HOP: Unsafe side effect: Attempted to mutate ConstDictVariable()",
            "torch/_dynamo/side_effects.py",
            parts=("mutate ConstDictVariable()",),
            holds=("HOP: Unsafe side effect", "Attempted to mutate "),
        ),
    ),
    links=("https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/dora.py",),
    why="""
        ``DoraLinearLayer`` keeps a cache for inference and empties it in every training forward. Inside a
        checkpoint Dynamo allows no write to an object outside of it, even if nothing changes. The result is 5
        graphs and 5 breaks, and every decoder layer runs in eager. peft >= 0.19, which added the cache.
    """,
    repair="""
        The repair does not clear a cache that is empty.
    """,
    requires=("peft>=0.19", "torch>=2.6"),
    tested_up_to="0.21.2",
    edits=(
        Rewrite(
            "peft.tuners.lora.dora:DoraLinearLayer._cache_clear",
            find="self._dora_cache.clear()",
            replace="""
                if self._dora_cache:
                    self._dora_cache.clear()
            """,
        ),
    ),
    defect=defect,
)
