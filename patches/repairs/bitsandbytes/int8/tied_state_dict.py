"""``state_dict()`` of a model with a tied INT8 head raises ``'Parameter' object has no attribute 'SCB'``."""

from __future__ import annotations

from ....engine import Finding, Message, Patch, Rewrite
from ....quantized.int8 import plain_weights


def defect() -> Finding:
    """Make the state dict of a head that is tied to its embedding."""
    import bitsandbytes as bnb
    import torch

    embedding = torch.nn.Embedding(32, 64)
    head = bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False)
    head.weight = embedding.weight
    try:
        keys = list(head.state_dict())
    except AttributeError as error:
        return Finding(True, f"state_dict of a tied head: {error}")
    return Finding(keys != ["weight"], f"state_dict of a tied head has {keys}")


PATCH = Patch(
    id="bitsandbytes-int8-tied-state-dict",
    summary="state_dict of an INT8 layer with a tied or sharded weight crashes: no attribute 'SCB'",
    groups=("save",),
    messages=(Message("'Parameter' object has no attribute 'SCB'", "figure"),),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1634",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1897",
    ),
    why="""
        ``Linear8bitLt._save_to_state_dict`` reads the scales from the weight. A weight that is tied to an
        embedding, or replaced by FSDP2, is a plain ``Parameter`` without them. On the meta device, transformers
        also removes the attribute from an ``Int8Params``. Saving fails, and so does loading with transformers,
        which reads the state dict (#1634). Up to 0.49.2.
    """,
    repair="""
        The repair is the one of 0.50.0 (#1897).
    """,
    requires=("bitsandbytes>=0.46.1,<0.50",),
    tested_up_to="0.49.2",
    edits=(
        Rewrite(
            "bitsandbytes.nn.modules:Linear8bitLt._save_to_state_dict",
            "getattr(self.weight, scb_name)",
            "getattr(self.weight, scb_name, None)",
        ),
        Rewrite.to_call(
            "bitsandbytes.nn.modules:Linear8bitLt._save_to_state_dict",
            "getattr(self.state, scb_name)",
            plain_weights.scale_to_save,
            "self",
        ),
    ),
    defect=defect,
)
