"""Let layers of peft keep offloaded weights of their base layer on the device for the whole of their own forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..offload import offloaded_modules, reload_saved_tensors

if TYPE_CHECKING:
    from torch.nn import Module


def hold_base_weights(layer: Module) -> None:
    """Let ``layer``, a layer of peft, bring the offloaded modules below it before its forward, once for all of it."""
    if any(isinstance(getattr(hook, "__self__", None), _Held) for hook in layer._forward_pre_hooks.values()):
        return
    held = _Held()
    layer.register_forward_pre_hook(held.begin, prepend=True)
    layer.register_forward_hook(held.end, always_call=True)


class _Held:
    """The visits to the offloaded modules below one layer while it runs, and the adapters that were merged before."""

    def __init__(self) -> None:
        self._visits: list[offloaded_modules.Visit] = []
        self._merged: list[str] = []
        self._recall: Any = None

    def begin(self, layer: Module, args: Any) -> None:
        self._visits = offloaded_modules.begin_visits(layer)
        self._merged = list(getattr(layer, "merged_adapters", ()))
        self._recall = reload_saved_tensors.enter_saved_tensor_hooks(self._visits)

    def end(self, layer: Module, args: Any, output: Any) -> None:
        if self._recall is not None:
            self._recall.__exit__(None, None, None)
            self._recall = None
        if self._merged != list(getattr(layer, "merged_adapters", ())):  # a forward without adapters takes them out
            for visit in self._visits:
                visit.keep()
        offloaded_modules.end_visits(self._visits)
