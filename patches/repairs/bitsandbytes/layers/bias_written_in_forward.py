"""``Linear4bit`` and ``Linear8bitLt`` overwrite their bias in forward."""

from __future__ import annotations

from ....engine import Finding, Message, Patch, Rewrite

_FOUR_BIT = "bitsandbytes.nn.modules:Linear4bit.forward"
_EIGHT_BIT = "bitsandbytes.nn.modules:Linear8bitLt.forward"
_ASSIGNMENT = """
if self.bias is not None and self.bias.dtype != x.dtype:
    self.bias.data = self.bias.data.to(x.dtype)
"""


def defect() -> Finding:
    """Run one bf16 forward through each layer: how far did the fp32 bias move?"""
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    torch.manual_seed(0)
    four = Linear4bit(64, 64, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
    eight = Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu")
    moved = []
    for layer in (four, eight):
        before = layer.bias.detach().clone()
        layer(torch.randn(2, 64, dtype=torch.bfloat16))
        moved.append((layer.bias.float() - before).abs().max().item() / before.abs().max().item())
    return Finding(
        max(moved) > 0,
        f"a forward changed the stored bias by {moved[0]:.1e} (4-bit), {moved[1]:.1e} (8-bit) of its maximum",
    )


PATCH = Patch(
    id="bitsandbytes-bias-written-in-forward",
    summary="the first forward rounds the stored bias permanently, and torch.compile cannot trace it",
    groups=("layers", "compile", "save"),
    silent=True,
    messages=(
        Message("Failed to mutate tensor data attribute to different dtype", "torch/_dynamo/variables/builtin.py"),
    ),
    links=("https://github.com/pytorch/pytorch/issues/152162",),
    why="""
        Both layers cast the bias by assigning ``bias.data``, in every release from 0.46.1 to 0.50.2. So the first
        forward in a narrower dtype rounds the stored bias permanently. Later fp32 forwards, the ``state_dict`` and
        the optimizer see the rounded values. If the dtypes differ, torch.compile cannot trace the assignment:
        ``Failed to mutate tensor data attribute to different dtype`` (for example in Qwen2, whose attention has
        biases).

        torch.compile's rule about such assignments: https://github.com/pytorch/pytorch/issues/152162
    """,
    repair="""
        The repair removes the assignment and casts a local copy to the dtype in which the product is computed.
        Where the assignment did no harm, the layer computes the same as before. Elsewhere there is one rounding
        less. The cast is differentiable, so the gradient of a trained bias keeps the dtype of the bias.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(_FOUR_BIT, _ASSIGNMENT, "", when="bitsandbytes<0.50"),
        Rewrite(_FOUR_BIT, "self.bias.to(self.compute_dtype)", "self.bias.to(x.dtype)", when="bitsandbytes<0.50"),
        Rewrite(
            _FOUR_BIT,
            "if bias.dtype != x.dtype:\n    bias.data = bias.data.to(x.dtype)",
            "",
            when="bitsandbytes>=0.50",
        ),
        Rewrite(_FOUR_BIT, "bias.to(self.compute_dtype)", "bias.to(x.dtype)", when="bitsandbytes>=0.50"),
        Rewrite(_EIGHT_BIT, _ASSIGNMENT, ""),
        Rewrite(
            _EIGHT_BIT,
            "bnb.matmul(x, self.weight, bias=self.bias, state=self.state)",
            """
                bnb.matmul(
                    x,
                    self.weight,
                    bias=None if (_patches_bias := self.bias) is None else _patches_bias.to(x.dtype),
                    state=self.state,
                )
            """,
        ),
    ),
    defect=defect,
)
