"""A copy or a pickle of a ``Params4bit`` loses what belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....engine import Finding, Message, Part, Patch, Rewrite
from ....quantized.four_bit import quant_states
from ....quantized.layer_methods import wrap_method
from ....quantized.weights.parameter_copies import is_read_by_default, reduce_with_class, restore_class

if TYPE_CHECKING:
    from bitsandbytes.nn import Params4bit


def _empty(original: Params4bit) -> Params4bit:
    """Return a weight of the class of ``original`` that can be given its data."""
    import torch

    cls: Any = type(original)
    if original.is_meta == torch.empty(0).is_meta:  # where bitsandbytes makes it: on torch's default device
        return cls.__new__(cls)
    return torch.Tensor._make_subclass(cls, torch.empty(0, device=original.device))


def _reduce_ex(weight: Params4bit, reduce: Callable[..., tuple[Any, ...]], protocol: int) -> tuple[Any, ...]:
    """Return what ``Parameter.__reduce_ex__`` does, with the class of a weight that is quantized or has a layer."""
    plain = quant_states.get_quant_state(weight) is None and weight.module is None
    reduced = reduce(protocol)
    return reduced if plain and is_read_by_default(protocol) else reduce_with_class(reduced, weight)


def defect_deepcopy() -> Finding:
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


def defect_offloaded() -> Finding:
    """Copy a layer that accelerate keeps in CPU memory."""
    import copy

    import torch
    from accelerate import cpu_offload
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    cpu_offload(layer, execution_device=torch.device("cpu"))
    try:
        copied = copy.deepcopy(layer)
    except RuntimeError as error:
        return Finding(True, f"deepcopy: {error}")
    kind = type(copied.weight)
    return Finding(kind is not type(layer.weight), f"deepcopy gives a weight of type {kind.__name__}")


def defect_pickle() -> Finding:
    """Save a layer and load it."""
    import io

    import torch
    from bitsandbytes.nn import Linear4bit

    file = io.BytesIO()
    torch.save(Linear4bit(64, 64, quant_type="nf4").to("cpu"), file)
    file.seek(0)
    kind = type(torch.load(file, weights_only=False).weight).__name__
    return Finding(kind != "Params4bit", f"a saved and loaded Linear4bit has a weight of type {kind}")


_PARAMETER = "bitsandbytes.nn.modules:Params4bit"
_SET_STATE = "new_instance.__setstate__(state)"

PATCH = Patch(
    id="bitsandbytes-params4bit-copies",
    summary="a copy of a 4-bit weight belongs to the original layer, fails on meta, or is a plain Parameter after pickle",
    groups=("save", "offload"),
    silent=True,
    messages=(
        Message(
            "Attempted to call `variable.set_data(tensor)`, but `variable` and `tensor` have incompatible tensor type.",
            "figure",
        ),
    ),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L341",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L244",
    ),
    why="""
        A copy of a ``Params4bit`` still belongs to the layer of the original. ``weight.module`` is the layer that
        gets the new ``QuantState`` when the weight is quantized. After ``copy.deepcopy`` of a layer or model, and
        after ``copy.copy`` of a weight, the copy still points to the original layer. If the copy is quantized, the
        original layer (still in full precision) gets the quantization state of the copy. The copied layer then has
        none to use when its weight loses its own (FSDP). ``deepcopy`` also ignores objects that it has copied
        already: weight and layer, which shared one quantization state, then have two, at twice the memory. All
        releases.

        An offloaded 4-bit model cannot be copied. Between two forwards accelerate keeps the weights of an offloaded
        layer on meta. ``copy.deepcopy`` and ``copy.copy`` of a ``Params4bit`` make an empty weight on the CPU and
        then set its data. torch refuses to set data on meta there: ``Attempted to call variable.set_data(tensor),
        but variable and tensor have incompatible tensor type``. This affects every program that deep-copies such a
        model: peft for a module to save, averages of weights, the reference model of DPO. Plain and INT8 models can
        be copied. A copy of a 4-bit model that was made under ``torch.device("meta")`` fails in the same way, and
        so does a copy of any 4-bit model that is made there. All releases.

        Pickle and ``torch.save`` turn a ``Params4bit`` into a plain ``Parameter``. ``torch.save(model)`` and
        ``pickle.dumps(weight)`` use ``Parameter.__reduce_ex__``, which rebuilds a ``torch.nn.Parameter`` and sets
        the attributes on it. The result computes, but is no 4-bit weight any more. If it was not quantized yet, it
        never will be. If it was, the next ``.to(dtype)`` casts its packed bits as values, peft does not recognize
        it, and its quantization state does not move with it. All releases.
    """,
    repair="""
        For copies, the repair passes ``memo`` on, as ``__deepcopy__`` should. The copied weight belongs to the copied
        layer and shares one quantization state with it. A weight that is copied alone belongs to no layer.

        For an offloaded model, the repair makes the empty weight on meta if the original is on meta, and only then. As
        for a plain model, the copy has copies of accelerate's hooks and of the tensors that they keep in memory, and
        reads the others from the same files.

        For pickles, the repair adds the class to the attributes that torch pickles; the rest of the pickle is as torch
        makes it. The pickle names nothing of bnb-patches and loads in a process without the plugin. If a pickle holds
        no ``QuantState`` and no layer (a weight alone that is not quantized yet), ``torch.load`` reads it with
        ``weights_only=True``, its default, which refuses the name of a class. Such a pickle stays as it was.

        When a layer is loaded whose pickle names no class (written without the patch), it gives its weights their
        class.
    """,
    former_ids=("bitsandbytes-params4bit-meta-copies", "bitsandbytes-params4bit-pickle"),
    parts=(
        Part(
            "deepcopy",
            ("bitsandbytes>=0.46.1",),
            "0.50.2",
            (
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
            defect_deepcopy,
        ),
        Part(
            "offloaded",
            ("bitsandbytes>=0.46.1",),
            "0.50.2",
            tuple(
                Rewrite.to_call(f"{_PARAMETER}.{name}", "type(self).__new__(type(self))", _empty, "self")
                for name in ("__deepcopy__", "__copy__")
            ),
            defect_offloaded,
        ),
        Part(
            "pickle",
            ("bitsandbytes>=0.46.1",),
            "0.50.2",
            (
                wrap_method("Params4bit", "__reduce_ex__", _reduce_ex),
                *(restore_class(layer, "Params4bit", quant_states.MARKS) for layer in ("Linear4bit", "Embedding4bit")),
            ),
            defect_pickle,
        ),
    ),
)
