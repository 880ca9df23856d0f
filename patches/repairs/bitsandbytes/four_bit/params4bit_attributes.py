"""A ``Params4bit`` lacks attributes with the names of its state dict."""

from __future__ import annotations

from typing import Any

from ....engine import DeleteAttribute, Finding, Message, Patch, SetAttribute
from ....engine.gate import satisfied
from ....quantized.four_bit import quant_states
from ....quantized.four_bit.quant_state_names import NESTED, OWN, packed_key


def proxy(name: str, attribute: str, nested: bool) -> property:
    """Return a property that shows ``attribute`` of the parameter's (nested) quantization state.

    Absent (``AttributeError``) on a parameter that is not quantized, or not doubly for a nested name.
    """

    def get(self: Any) -> Any:
        if name in self.__dict__:
            return self.__dict__[name]
        state: Any = quant_states.get_quant_state(self)
        if state is not None and nested:
            state = state.state2
        if state is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(state, attribute)

    def put(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    def drop(self: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(name)
        del self.__dict__[name]

    return property(get, put, drop, f"``{attribute}`` of the quantization state.")


def defect() -> Finding:
    """Read the state dict of a model as FSDP does, then compile a checkpointed step."""
    import torch
    from bitsandbytes.nn import Linear4bit
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4"))
    model.to("cpu")
    try:
        names = list(get_model_state_dict(model))
    except AttributeError as error:
        return Finding(True, f"get_model_state_dict: {error}")
    if satisfied("torch<2.8") or satisfied("torch<2.13 and bitsandbytes>=0.49"):
        return Finding(
            False, f"get_model_state_dict reads {len(names)} values; this torch needs other patches for one graph"
        )
    x = torch.randn(2, 64, requires_grad=True)
    model(x)
    torch.compiler.reset()
    step = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), fullgraph=True, backend="eager")
    try:
        step(x).sum().backward()
    except torch._dynamo.exc.Unsupported as error:
        return Finding(True, f"fullgraph + checkpoint: {str(error).splitlines()[0]}")
    return Finding(False, f"get_model_state_dict reads {len(names)} values; torch.compile makes 1 graph")


PATCH = Patch(
    id="bitsandbytes-params4bit-attributes",
    summary="get_model_state_dict (FSDP, DCP) fails on 4-bit models; bitsandbytes built from git before 0.50 breaks fullgraph",
    groups=("shard", "save", "compile"),
    messages=(Message("'Params4bit' object has no attribute 'absmax'", "figure"),),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1405",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1866",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1904",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1916",
    ),
    why="""
        ``Linear4bit.state_dict()`` writes ``weight.absmax``, ``weight.quant_map`` ... and
        ``weight.quant_state.bitsandbytes__nf4``. ``torch.distributed.checkpoint.state_dict`` (FSDP, DCP) follows
        each of these names with ``getattr`` from the module down, so each must be an attribute.

        - Up to 0.49.2 there is none: ``get_model_state_dict`` raises ``'Params4bit' object has no attribute
          'absmax'`` (#1405).
        - Source builds between 0.49.2 and 0.50.0 (#1866) answer in ``Params4bit.__getattr__``. Dynamo cannot trace
          a ``__getattr__`` of a tensor subclass: ``torch.compile(fullgraph=True)`` over a checkpointed block fails
          (#1904).
    """,
    repair="""
        The repair is the one of 0.50.0 (#1916): one property for each name on ``Params4bit``, which Dynamo traces,
        no ``__getattr__`` there, and one on ``QuantState`` for the packed key. Unlike in 0.50.0, an attribute of
        that name that was set on an instance takes precedence, because these releases allow it. There are no
        properties for ``blocksize``, ``quant_type``, ``dtype`` and ``shape``: instances and ``torch.Tensor`` have
        these, and the state dict has them inside the packed key. ``nested_offset`` is ``offset`` of the
        quantization state, the value that is saved under this name.
    """,
    requires=("bitsandbytes>=0.46,<0.50",),
    tested_up_to="0.50.2",
    edits=(
        DeleteAttribute("bitsandbytes.nn.modules:Params4bit.__getattr__", missing_ok=True),
        *(
            SetAttribute(
                f"bitsandbytes.nn.modules:Params4bit.{name}",
                value=proxy(name, attribute, names is NESTED),
                keep=True,
            )
            for names in (OWN, NESTED)
            for name, attribute in names.items()
        ),
        SetAttribute("bitsandbytes.functional:QuantState.__getattr__", value=packed_key, keep=True),
    ),
    defect=defect,
)
