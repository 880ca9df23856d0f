"""A copy of a ``Params4bit`` still belongs to the layer of the original.

``weight.module`` is the layer that gets the new ``QuantState`` when the weight is quantized. After ``copy.deepcopy``
of a layer or model, and after ``copy.copy`` of a weight, the copy still points to the original layer. If the copy is
quantized, the original layer (still in full precision) gets the quantization state of the copy. The copied layer then
has none to use when its weight loses its own (FSDP). ``deepcopy`` also ignores what it has copied already: weight and
layer, which shared one quantization state, then have two, at twice the memory. All releases.

The repair passes ``memo`` on, as ``__deepcopy__`` should. The copied weight belongs to the copied layer and shares one
quantization state with it. A weight that is copied alone belongs to no layer.
"""

from __future__ import annotations

from ....engine import Finding, Patch, Rewrite

_PARAMETER = "bitsandbytes.nn.modules:Params4bit"
_SET_STATE = "new_instance.__setstate__(state)"


def defect() -> Finding:
    """Copy a layer, quantize the copy: what became of the original?"""
    import copy

    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(64, 64, quant_type="nf4")
    copied = copy.deepcopy(layer).to("cpu")
    written = layer.quant_state is not None
    home = "its own" if copied.weight.module is copied else "the original"
    return Finding(
        written or home != "its own",
        f"quantizing a deep copy {'wrote' if written else 'did not write'} to the original layer; "
        f"its weight belongs to {home} layer",
    )


PATCH = Patch(
    id="bitsandbytes-params4bit-copies",
    summary="quantizing a deep copy of a 4-bit layer writes to the original layer",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L341",),
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    seen_on=("2.8", "2.13", "2.14", "2.15"),
    edits=(
        Rewrite(
            f"{_PARAMETER}.__deepcopy__",
            _SET_STATE,
            f"{_SET_STATE}\nmemo[id(self)] = new_instance\nnew_instance.module = memo.get(id(self.module))",
        ),
        Rewrite(
            f"{_PARAMETER}.__deepcopy__",
            "copy.deepcopy(state['quant_state'])",
            "copy.deepcopy(state['quant_state'], memo)",
        ),
        Rewrite(f"{_PARAMETER}.__copy__", _SET_STATE, f"{_SET_STATE}\nnew_instance.module = None"),
    ),
    defect=defect,
)
