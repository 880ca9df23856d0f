"""``Params4bit`` and ``Int8Params`` refuse attributes that newer libraries set on them."""

from __future__ import annotations

import inspect
from typing import Any

from ....engine import Finding, Message, Patch, SetAttribute


def make_new(original: staticmethod[..., Any]) -> staticmethod[..., Any]:
    """Return a ``__new__`` that leaves out keyword arguments which the one of this release does not know."""
    construct = original.__get__(None, object)  # through a wrapper that another program has put there
    known = frozenset(inspect.signature(construct).parameters)

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        return construct(cls, *args, **{name: value for name, value in kwargs.items() if name in known})

    return staticmethod(__new__)


def defect() -> Finding:
    """Make a parameter again from the attributes of the old one, as accelerate, peft and transformers do."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    refused = []
    for layer in (Linear4bit(64, 64, quant_type="nf4"), Linear8bitLt(64, 64, has_fp16_weights=False)):
        old = layer.to("cpu").weight
        old.tensor_parallel = False  # a mark, as many a library leaves one on parameters
        try:
            type(old)(old.data, requires_grad=False, **old.__dict__)
        except TypeError:
            refused.append(type(old).__name__)
    return Finding(bool(refused), f"constructors that refuse another keyword: {' and '.join(refused) or 'none'}")


PATCH = Patch(
    id="bitsandbytes-constructor-kwargs",
    summary="accelerate cannot move weights on which newer transformers set attributes: unexpected keyword argument",
    groups=("move", "offload"),
    messages=(
        Message(
            "Params4bit.__new__() got an unexpected keyword argument '_is_hf_initialized'",
            "transformers/modeling_utils.py",
            parts=("__new__() got an unexpected keyword argument '_is_hf_initialized'",),
            holds=("_is_hf_initialized",),
        ),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1900",),
    why="""
        Whenever accelerate puts a quantized parameter on a device, it makes it again from the attributes of the old
        one: ``type(old)(value, requires_grad=..., **old.__dict__)``. transformers 5 marks parameters with
        ``_is_hf_initialized``, which accelerate removes only from 1.14 on. So loading, dispatching and offloading
        fail on bitsandbytes <= 0.49.2 with ``__new__() got an unexpected keyword argument`` (#1900). Any other
        attribute causes the same error with any accelerate.
    """,
    repair="""
        The repair is the one of bitsandbytes 0.50.0: both constructors accept further keyword arguments and ignore
        them.
    """,
    requires=("bitsandbytes>=0.46,<0.50",),
    tested_up_to="0.50.2",
    edits=tuple(
        SetAttribute(
            f"bitsandbytes.nn.modules:{name}.__new__",
            make=make_new,
            original_contains="torch.Tensor._make_subclass(cls, data, requires_grad)",
        )
        for name in ("Params4bit", "Int8Params")
    ),
    defect=defect,
)
