"""``F.linear(x, weight, bias=bias)`` with a torchao weight silently ignores the bias."""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, Rewrite

_NAMES = ("input", "weight", "bias")


def by_position(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``args`` and ``kwargs`` of a call of ``func``, with the arguments of ``linear`` by position up to the first absent one."""
    import torch

    if not kwargs or func is not torch.nn.functional.linear:
        return args, kwargs
    given = _NAMES[len(args) :]
    count = next((at for at, name in enumerate(given) if name not in kwargs), len(given))
    rest = {name: value for name, value in kwargs.items() if name not in given[:count]}
    return (*args, *(kwargs[name] for name in given[:count])), rest


def defect() -> Finding:
    """Compute a product with a bias, by position and by keyword."""
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 32)
    quantize_(layer, Int8WeightOnlyConfig())
    x, linear = torch.randn(4, 64), torch.nn.functional.linear
    expected = linear(x, layer.weight, layer.bias)
    error = ((linear(x, layer.weight, bias=layer.bias) - expected).norm() / expected.norm()).item()
    return Finding(error > 0, f"bias passed by keyword: relative error of the output {error:.3f}")


PATCH = Patch(
    id="torchao-linear-keywords",
    summary="F.linear(x, weight, bias=bias) with a torchao weight silently ignores the bias",
    groups=("layers",),
    silent=True,
    links=("https://github.com/pytorch/ao/blob/main/torchao/utils.py",),
    why="""
        torchao's implementations of ``torch.nn.functional.linear`` for quantized weights read their arguments by
        position. If the bias is passed by keyword, it is silently left out. If the weight is passed by keyword,
        they raise ``IndexError: tuple index out of range``. ``nn.Linear`` passes all arguments by position; code
        that calls the function itself often does not: fused projections, hand-written attention, adapters. Affects
        ``Int8Tensor``, ``Float8Tensor``, ``IntxUnpackedToInt8Tensor`` and the other weights of ``quantize_``,
        torchao 0.14.1 to 0.18.0.
    """,
    repair="""
        The repair puts the arguments in their positions before an implementation sees them. A call by position
        stays as it was.
    """,
    requires=("torchao>=0.14.1",),
    tested_up_to="0.18.0",
    edits=(
        Rewrite(
            "torchao.utils:_dispatch__torch_function__",
            find="kwargs = {} if kwargs is None else kwargs",
            replace="args, kwargs = _patches_by_position(func, args, {} if kwargs is None else kwargs)",
            names={"_patches_by_position": by_position},
        ),
    ),
    defect=defect,
)
