"""Adapters of experts as peft before 0.19 saved them: read into the layout of 0.19 and later.

``lora_A`` is (experts * rank, in) and ``lora_B`` (out, rank * experts). For a parameter (experts, out, in) peft before
0.19 took its second dimension for "in" and its third for "out". So its ``lora_A`` belongs to the rows and its
``lora_B`` to the columns, where later releases have it the other way round. The same numbers in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine import Rewrite
from ..process.messages import LOGGER

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

ASSUMED_VERSION = "0.17"  # where a configuration names none: the first release with target_parameters


class _Pair(NamedTuple):
    """The keys of ``lora_A`` and ``lora_B`` of one parameter in a state dict, and the layer that has them."""

    keys: tuple[str, str]
    layer: Any

    def fits(self, state: dict[str, Tensor], old: bool) -> bool:
        """Tell whether the shapes fit the ``old`` layout, or the new one."""
        sides = (self.layer.in_features, self.layer.out_features)
        a, b = (state[key] for key in self.keys)
        first, second = reversed(sides) if old else sides
        return bool(a.shape[1:] == (first,) and b.shape[:1] == (second,) and a.shape[0] == b.shape[1])

    def converted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        a, b = (state[key] for key in self.keys)
        experts = self.layer.num_experts
        rows = a.reshape(experts, -1, a.shape[1]).permute(2, 1, 0).flatten(1)
        columns = b.reshape(b.shape[0], -1, experts).permute(2, 1, 0).flatten(0, 1)
        return {self.keys[0]: columns.contiguous(), self.keys[1]: rows.contiguous()}


def convert_to_new_layout(model: Module, config: Any, adapter: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``state``, named as in ``model``, with factors of experts in the layout that the installed peft reads.

    Raises `ValueError` if some factors fit only the old layout, and others only the new one.
    """
    pairs = list(_pairs(model, adapter, state))
    old = [pair for pair in pairs if pair.fits(state, old=True)]
    new = [pair for pair in pairs if pair.fits(state, old=False)]
    only_old = [pair for pair in old if pair not in new]
    only_new = [pair for pair in new if pair not in old]
    if only_old and only_new:
        raise ValueError(
            f"adapter {adapter!r} has {only_old[0].keys[0]} in the layout of peft before 0.19 and {only_new[0].keys[0]} "
            "in the layout of later releases. No release of peft writes both, so the file joins two adapters. Nothing was "
            "loaded"
        )
    if not old or only_new or not (only_old or _is_old(config)):
        return state
    if not only_old:  # square matrices: both layouts have the same shapes
        LOGGER.warning(
            "Adapter %r of experts was saved by peft %s, before 0.19, and is read in the layout of that release. Its "
            "shapes do not tell the layouts apart. If it was trained or saved with peft 0.19 or later, set "
            '"peft_version" in its adapter_config.json to that release and load it again.',
            adapter,
            config.peft_version,
        )
    config.peft_version = config._get_peft_version()  # saving writes the new layout
    return {**state, **{key: tensor for pair in old for key, tensor in pair.converted(state).items()}}


def _pairs(model: Module, adapter: str, state: dict[str, Tensor]) -> Iterator[_Pair]:
    for name, layer in model.named_modules():
        if not getattr(layer, "_did_swap_in_out_features", False) or adapter not in getattr(layer, "lora_A", ()):
            continue
        prefix = f"{name}." if name else ""
        pair = _Pair((f"{prefix}lora_A.{adapter}.weight", f"{prefix}lora_B.{adapter}.weight"), layer)
        if all(key in state and state[key].dim() == 2 for key in pair.keys):
            yield pair


def _is_old(config: Any) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(str(config.peft_version).partition("@")[0]).release < (0, 19)
    except InvalidVersion:
        return False


def fill_in_missing_version(attributes: dict[str, Any]) -> dict[str, Any]:
    """Fill in ``ASSUMED_VERSION`` where an adapter's configuration names no version: peft would fill in its own."""
    if attributes.get("target_parameters") and attributes.get("peft_version") is None:
        return {**attributes, "peft_version": ASSUMED_VERSION}
    return attributes


RECORD_VERSION = Rewrite(
    "peft.config:PeftConfigMixin.from_pretrained",
    find="{**class_kwargs, **loaded_attributes}",
    replace="{**class_kwargs, **_patches_fill_in_missing_version(loaded_attributes)}",
    names={"_patches_fill_in_missing_version": fill_in_missing_version},
)
"""The edit that keeps the release that wrote a file: each patch that needs it declares it."""


def converted_state_dict(
    model: Module, config: Any, adapter: str, state: dict[str, Tensor] | None, folder: str | None
) -> dict[str, Tensor] | None:
    """Return the tensors for ``model.load_adapter`` to load: ``state``, or the file in ``folder`` if ``state`` is None.

    Returns ``state`` itself where nothing has to be converted.
    """
    if getattr(config, "target_parameters", None) is None or not _is_old(config):
        return state
    tensors = state
    if tensors is None and folder is not None:
        from peft.utils.save_and_load import load_peft_weights

        tensors = load_peft_weights(folder, device="cpu")
    if not tensors:
        return state
    names = {_in_model(key, adapter): key for key in tensors}
    found = convert_to_new_layout(model, config, adapter, {name: tensors[key] for name, key in names.items()})
    new = {names[name]: tensor for name, tensor in found.items()}
    return state if all(new[key] is tensors[key] for key in tensors) else new


def _in_model(key: str, adapter: str) -> str:
    """Return the name in the model of a tensor of a file: with the adapter's name, without the prefix of ``PeftModel``."""
    name = key.removeprefix("base_model.model.")
    for kind in ("lora_A", "lora_B"):
        name = name.replace(f"{kind}.weight", f"{kind}.{adapter}.weight")
    return name
