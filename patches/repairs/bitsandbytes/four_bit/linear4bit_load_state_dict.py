"""``Linear4bit`` cannot load the state dict that it saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import Finding, Message, Patch, Rewrite
from ....process import call_stack
from ....quantized.four_bit import partial_loads, quant_states
from ....quantized.four_bit.quant_state_dict import IncompleteState, bytes_of_packed_weight
from ....quantized.layer_methods import Load, wrap_method
from ....quantized.own_packed_weights import is_own_packed_weight
from ....quantized.weights import dequantized_in_place
from ....quantized.weights.parameter_copies import make_like

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit, Params4bit

    from ....quantized.four_bit.partial_loads import Group


def _load_from_state_dict(layer: Linear4bit, *args: Any, **kwargs: Any) -> None:
    """Load the packed weight and the quantization state of ``layer`` together, and the rest as ``nn.Module`` does."""
    load = Load(*args, **kwargs)
    weight = load.prefix + "weight"
    group, others = dict[str, Any](), dict[str, Any]()
    for key, value in load.state_dict.items():
        if (key + ".").startswith(weight + "."):
            group[key[len(weight) :].lstrip(".")] = value
        else:
            others[key] = value
    if not _is_quantized_group(layer, group):
        load.run()
        return
    if _stands_alone(layer, group, load.assign) and not partial_loads.is_waiting(layer):
        old = layer.weight
        partial_loads.note_own(layer, group, load.assign)
        load.run()
        _keep_statistics(layer, old)
        return
    found, lacking = None, set[str]()
    try:
        found = partial_loads.read_with_parts(layer, _with_carried_state(group), load.assign)
    except ValueError as error:
        if lacking := _lacking(layer, group):
            partial_loads.note_own(layer, group, load.assign)
        elif isinstance(error, IncompleteState) and partial_loads.collect_part(layer, group, load.assign):
            lacking = error.keys
        else:
            load.error_msgs.append(f"The 4-bit weight {weight!r} was not loaded and not changed: {error}")
            return
    missing, known, errors = load.missing_keys, len(load.missing_keys), len(load.error_msgs)
    load.run(others)
    missing[known:] = [key for key in missing[known:] if key != weight]
    if found is None:
        missing += [f"{weight}.{key}".rstrip(".") for key in sorted(lacking)]
    elif len(load.error_msgs) == errors and not (missing[known:] and load.strict and call_stack.loads_strictly()):
        _install(layer, *found)


def _is_quantized_group(layer: Linear4bit, group: Group) -> bool:
    """Tell whether ``group`` is to be loaded or refused here, and not by ``nn.Module``."""
    from bitsandbytes.nn import Params4bit

    if not group or not isinstance(layer._parameters.get("weight"), Params4bit):  # a parametrized one has other keys
        return False
    if set(group) != {""} or quant_states.is_packed(layer.weight):
        return True
    return group[""].shape[1:] == (1,) and group[""].nbytes == bytes_of_packed_weight(layer)


def _stands_alone(layer: Linear4bit, group: Group, assign: bool) -> bool:
    """Tell whether ``group`` is a packed weight alone whose quantization state is there when ``nn.Module`` has loaded it."""
    if set(group) != {""} or not quant_states.is_packed(layer.weight):
        return False
    return is_own_packed_weight(group[""], layer.weight) or (assign and _carried_state(group[""]) is not None)


def _lacking(layer: Linear4bit, group: Group) -> set[str]:
    """Return the keys that ``group`` lacks if all its tensors equal the ones of ``layer``: loading them changes nothing."""
    state = quant_states.get_quant_state(layer.weight)
    if state is None or not quant_states.is_packed(layer.weight):
        return set()
    own = {"": layer.weight, **state.as_dict(packed=True)}
    same = all(
        key in own and own[key].shape == new.shape and is_own_packed_weight(new, own[key]) for key, new in group.items()
    )
    return own.keys() - group.keys() if same else set()


def _keep_statistics(layer: Linear4bit, old: Params4bit) -> None:
    """After ``assign=True``, give a plain tensor the class and state of ``old``, and the layer the state of a new weight."""
    if layer.weight is old:  # its bytes were copied into it, and equal the ones that it had
        return
    state = _carried_state(layer.weight)
    if state is None:
        layer.weight = make_like(old, layer.weight.data)
    else:
        quant_states.set_quant_state(state, layer)


def _with_carried_state(group: Group) -> Group:
    """Return ``group`` with the entries of the quantization state that a packed weight which comes alone carries."""
    state = _carried_state(group[""]) if set(group) == {""} else None
    if state is None or quant_states.is_for_cpu_kernel(state):  # never saved
        return group
    return {**group, **state.as_dict(packed=True)}


def _carried_state(weight: torch.Tensor) -> QuantState | None:
    """Return the quantization state of ``weight`` if it is a quantized ``Params4bit``."""
    from bitsandbytes.nn import Params4bit

    quantized = isinstance(weight, Params4bit) and quant_states.is_packed(weight)
    return quant_states.get_quant_state(weight) if quantized else None


def _install(layer: Linear4bit, packed: torch.Tensor, state: QuantState) -> None:
    """Give ``layer`` the ``packed`` weight and its ``state``, on the parameter object that it has."""
    weight = layer.weight
    if weight.device.type == "meta":  # a parameter cannot leave it
        weight = layer.weight = make_like(weight, packed)
    weight.requires_grad = False
    weight.data = packed
    quant_states.set_quant_state(state, weight, layer)
    weight.blocksize = state.blocksize
    weight.compress_statistics = state.nested
    weight.quant_type = state.quant_type
    weight.quant_storage = layer.quant_storage = packed.dtype
    quant_states.mark_quantized(weight)
    partial_loads.forget_parts(layer)


def _statistics(weight: Params4bit) -> Group:
    """Return the entries to save of the quantization state; none if a program has dequantized ``weight`` in place."""
    state = quant_states.get_quant_state(weight)
    return {} if state is None or dequantized_in_place.holds_floats(weight) else state.as_dict(packed=True)


def defect() -> Finding:
    """Load what one layer has saved into another one."""
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    saved, live = (Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4") for _ in range(2))
    torch.nn.init.normal_(saved.weight)
    saved.to("cpu"), live.to("cpu")
    x = torch.randn(2, 64)
    live.load_state_dict(saved.state_dict(), strict=False)
    error = ((live(x) - saved(x)).norm() / saved(x).norm()).item()
    return Finding(error > 0, f"relative error of the output {error:.2f} after load_state_dict(strict=False)")


PATCH = Patch(
    id="bitsandbytes-linear4bit-load-state-dict",
    summary="Linear4bit cannot load its own state dict; strict=False gives wrong outputs silently",
    groups=("save",),
    silent=True,
    messages=(
        Message(
            'Unexpected key(s) in state_dict: "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"',
            "torch/nn/modules/module.py",
            parts=("Unexpected key(s) in state_dict", "absmax"),
            holds=("Unexpected key(s) in state_dict",),
        ),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1946",),
    why="""
        ``state_dict()`` of a quantized layer holds the packed weight and its quantization state (``weight.absmax``,
        ``weight.quant_map``, ``weight.quant_state.bitsandbytes__nf4`` and, double-quantized, two more). But the
        layer has no ``_load_from_state_dict``, and ``nn.Module``'s knows only the packed weight (#1946, 0.46.1 to
        0.50.2):

        - ``strict=True`` raises an error about "unexpected" keys;
        - ``strict=False`` copies the packed weight and keeps the quantization state that the layer had: every
          output is wrong, silently;
        - loading into a layer that is not quantized yet fails in both cases.
    """,
    repair="""
        The repair loads these keys as one group. A complete group that fits becomes the new packed weight and
        ``QuantState``, as copies, or with ``assign=True`` as the given tensors themselves. The parameter stays the same
        object. Block size, quant type, storage dtype and double quantization become the saved ones, as with
        ``Params4bit.from_prequantized``. If a key is unknown or of another shape, an error names it, also with
        ``strict=False``, because packed weights are meaningless with another quantization state. If a key is missing
        and ``strict=True``, an error names it, too. In both cases the layer and its bias are left as they were. With
        ``strict=False`` a missing key may be in another file, for example if transformers' ``load_sharded_checkpoint``
        loads one file after the other: the layer has no quantization state until all keys have come, and its forward
        raises an error that names it.

        If scales were cast after they were saved (to make a file smaller), they become float32 again, because the
        kernels read them as float32. What the cast rounded away stays lost.

        If a program has dequantized a weight in place, the weight is saved without the quantization state of the packed
        weight that it replaced: neither bitsandbytes nor transformers could load both together.

        Packed weights alone, as in ``dict(model.named_parameters())``, are a whole group if their quantization
        state is known: they equal the layer's own bit for bit, or are a ``Params4bit`` that has one.

        ``nn.Module`` loads everything else as before: state dicts without a key of the weight (adapters),
        floating-point weights for a layer that is not quantized yet, and layers whose weight FSDP has flattened
        into a plain tensor.
    """,
    requires=("bitsandbytes>=0.46",),
    tested_up_to="0.50.2",
    edits=(
        wrap_method("Linear4bit", "_load_from_state_dict", _load_from_state_dict),
        Rewrite.to_call(
            "bitsandbytes.nn.modules:Linear4bit._save_to_state_dict",
            "self.weight.quant_state.as_dict(packed=True)",
            _statistics,
            "self.weight",
        ),
        Rewrite(
            "bitsandbytes.nn.modules:fix_4bit_weight_quant_state_from_module",
            find="assert module.weight.shape[1] == 1",
            replace="_patches_refuse_parts(module)\nassert module.weight.shape[1] == 1",
            names={"_patches_refuse_parts": partial_loads.refuse_missing_parts},
        ),
    ),
    defect=defect,
)
