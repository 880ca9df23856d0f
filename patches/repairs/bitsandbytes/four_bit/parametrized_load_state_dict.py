"""A module with a parametrized 4-bit parameter cannot load the state dict that it saved."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ....engine import Finding, Patch, Rewrite
from ....quantized.four_bit import quant_states
from ....quantized.four_bit.quant_state_dict import QuantizedWeight, read_for_weight, refuse_cast

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState

_REGISTER = "module.register_forward_pre_hook(_enable_parametrization_cache)"


def register_load_hook(module: torch.nn.Module, parameter: str) -> None:
    """Let ``module`` load the keys that it saves of ``parameter``."""
    module.register_load_state_dict_pre_hook(partial(load_parameter, parameter=parameter))


def load_parameter(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    *lists: list[str],
    parameter: str,
) -> None:
    """Take the quantization state of ``parameter`` out of ``state_dict``, and name its packed weights as torch does."""
    from bitsandbytes.nn.parametrize import Bnb4bitParametrization
    from torch.nn.utils.parametrize import is_parametrized

    key = prefix + parameter
    saved = {k[len(key) + 1 :]: v for k, v in state_dict.items() if k.startswith(key + ".")}
    if key not in state_dict or not saved or not is_parametrized(module, parameter):
        return
    chain: Any = module.parametrizations[parameter]  # type: ignore[index]  # nn.Module does not know its type
    dequantizing = next((one for one in chain if isinstance(one, Bnb4bitParametrization)), None)
    if dequantizing is None:
        return
    packed = state_dict.pop(key)
    for name in saved:
        del state_dict[f"{key}.{name}"]
    held = chain.original
    original = f"{prefix}parametrizations.{parameter}.original"
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    try:
        state = _read(parameter, quant_states.get_quant_state(dequantizing), held, {"": packed, **saved}, assign)
    except ValueError as error:
        error_msgs = lists[-1]
        error_msgs.append(f"The 4-bit parameter {key!r} was not loaded and not changed: {error}")
        state_dict[original] = held.detach()
    else:
        quant_states.set_quant_state(state, dequantizing)
        state_dict[original] = packed


def _read(parameter: str, old: Any, held: torch.Tensor, group: dict[str, torch.Tensor], assign: bool) -> QuantState:
    """Return the quantization state in ``group``. Raises ``ValueError`` if ``group`` does not fit a parameter like ``held``."""
    import torch

    packed = group[""]
    if (packed.shape, packed.dtype) != (held.shape, held.dtype):
        found, expected = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (packed, held))
        raise ValueError(f"its packed weights are {found}, expected {expected}")
    weight = QuantizedWeight(parameter, tuple(old.shape), old.quant_type, held.device)
    refuse_cast(repr(parameter), packed)
    # torch loads the packed weights themselves, sharded ones as well; here their number and device are enough.
    stand_in = torch.empty(1, dtype=torch.uint8, device=packed.device).expand(weight.nbytes)
    _, state = read_for_weight(weight, {**group, "": stand_in}, assign)
    state.dtype = old.dtype
    return state


def defect() -> Finding:
    """Load what one module with 4-bit experts has saved into another one."""
    import torch

    try:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit
    except ImportError:
        return Finding(False, "this release has no parametrized 4-bit parameters")

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(4, 64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w

    torch.manual_seed(0)
    saved, live = Experts(), Experts()
    for experts in (saved, live):
        replace_parameter_4bit(experts, "w")
    live.load_state_dict(saved.state_dict(), strict=False)
    x = torch.randn(2, 64)
    error = ((live(x) - saved(x)).norm() / saved(x).norm()).item()
    return Finding(error > 0, f"relative error of the output {error:.2f} after load_state_dict(strict=False)")


PATCH = Patch(
    id="bitsandbytes-parametrized-load-state-dict",
    summary="modules with parametrized 4-bit parameters (MoE experts) cannot load their own state dict",
    groups=("experts", "save"),
    silent=True,
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1720",),
    why="""
        ``bitsandbytes.nn.parametrize.replace_parameter_4bit`` keeps the packed weights of a parameter ``w``
        (experts of MoE models) as ``parametrizations.w.original``. A hook saves them as ``w``, beside ``w.absmax``
        and the rest of the quantization state. Nothing reads these keys on loading: ``strict=True`` raises an error
        about missing and unexpected keys, and ``strict=False`` loads nothing, so the module keeps its old weights
        (outputs are 138 % off). 0.48.0 to 0.50.2, all releases that have the function.

        Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1720 (added the hook for saving)
    """,
    repair="""
        The repair registers a hook for loading. It loads the packed weights under the name that torch has for them,
        and gives their quantization state to the parametrization: copies, or with ``assign=True`` the given
        tensors. The dtype after dequantizing stays the module's, as for every parameter that is loaded. If a group
        of keys is incomplete, was made from another shape or has no quantization state, an error names the key, and
        the parameter is left as it was. A parametrized module cannot be pickled, so the hook never leaves the
        process.

        Only modules that are prepared after the patch was applied are repaired.
    """,
    requires=("bitsandbytes>=0.48",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            "bitsandbytes.nn.parametrize:_register_parametrization_hooks",
            _REGISTER,
            f"{_REGISTER}\n_patches_register(module, param_name)",
            names={"_patches_register": register_load_hook},
        ),
    ),
    defect=defect,
)
