"""Modules that accelerate offloads: which hook brings the weights of a module, and how to have them for longer than a forward.

``AlignDevicesHook`` puts the weights of its module on the execution device before the module's forward, from a map
of names to tensors (in memory, or on disk), and leaves parameters on the meta device after it. Code that reads such a
weight at any other time finds no values, and a write to it goes to a tensor that the next forward replaces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..process.tensor_bits import have_same_bits
from ..quantized.accelerate_hooks import hook_of
from ..quantized.int8 import row_scales
from ..quantized.quantized_experts import is_quantized_experts
from . import weights_maps

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module


def execution_device(module: Module) -> torch.device | None:
    """Return where the forward of ``module`` runs, if its weights are offloaded; else None."""
    import torch

    hook = hook_of(module)
    return None if hook is None or hook.execution_device is None else torch.device(hook.execution_device)


def first_execution_device(model: Module) -> torch.device | None:
    """Return where the forward of the first offloaded module in ``model`` runs; None if there is none."""
    return next(filter(None, map(execution_device, model.modules())), None)


def is_offloaded(module: Module) -> bool:
    """Tell whether something in ``module`` is offloaded now. Cheap where accelerate has no hook."""
    return any(hook_of(part) is not None for part in module.modules())


def refuse_if_brought_by_another(target: Module, model: Module) -> None:
    """Raise if the weights of ``target`` are offloaded by the hook of a module around it."""
    if not any(p.is_meta for p in target.parameters()):
        return
    for name, module in model.named_modules():
        hook = hook_of(module)
        if hook is not None and hook.place_submodules and any(part is target for part in module.modules()):
            raise ValueError(
                f"The model was offloaded with preload_module_classes: accelerate loads the weights of all modules in "
                f"{name or type(model).__name__!r} by name, so no adapter can be added to them. Offload the model "
                "without preload_module_classes."
            )


class Visit:
    """The weights of one module on its execution device, until :meth:`end`; its own forwards leave them there."""

    def __init__(self, module: Module, hook: Any) -> None:
        self.module, self.hook = module, hook
        self._before = self._layouts()
        hook.pre_forward(module)
        weight: Any = getattr(module, "weight", None)  # may be a plain one: of the embedding that a head is tied to
        if type(module).__name__ == "Linear8bitLt" and row_scales.has_scales(weight):
            row_scales.restore_missing_scales(module)
        hook._patches_visited = True
        hook.offload = False  # so that a forward of the module neither brings them again nor takes them away

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the hook moves, by their names there."""
        from accelerate.utils import named_module_tensors

        return dict(
            named_module_tensors(
                self.module,
                include_buffers=self.hook.offload_buffers,
                recurse=self.hook.place_submodules,
                remove_non_persistent=True,
            )
        )

    def unchanged(self) -> dict[str, Tensor]:
        """Return the tensors that the hook has brought as they are, but for a cast, and did not quantize on the way."""
        now = self._layouts()
        return {name: tensor for name, tensor in self.tensors().items() if self._before.get(name) == now[name]}

    def _layouts(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self.tensors().items()}

    def keep(self) -> None:
        """Have the next forward bring the weights as they are now."""
        for name, tensor in self.tensors().items():
            weights_maps.write_to_map(self.hook, name, tensor)

    def end(self) -> None:
        """Offload the weights again."""
        self.hook.offload = True
        del self.hook._patches_visited
        self.hook.post_forward(self.module, ())


def begin_visits(root: Module) -> list[Visit]:
    """Bring all that is offloaded below ``root``; the caller ends the visits by :func:`end_visits`."""
    found: list[Visit] = []
    try:
        waiting: list[Module | None] = [root]
        seen: set[Module] = set()
        while waiting:  # in the order of `root.modules()`, whose nested generators take longer than this
            module = waiting.pop()
            if module is None or module in seen:
                continue
            seen.add(module)
            hook = hook_of(module)
            if hook is not None:
                found.append(Visit(module, hook))
            waiting.extend(reversed(list(module._modules.values())))
    except BaseException:
        end_visits(found)
        raise
    return found


def end_visits(visits: list[Visit]) -> None:
    """End each of ``visits``, the last first."""
    while visits:
        visits.pop().end()


@contextlib.contextmanager
def onload(root: Module) -> Iterator[list[Visit]]:
    """Have all that is offloaded below ``root`` on its execution device, to be read."""
    found = begin_visits(root)
    try:
        yield found
    finally:
        end_visits(found)


@contextlib.contextmanager
def onload_to_change(root: Module) -> Iterator[None]:
    """Do the same for a change: tensors that are changed meanwhile are offloaded changed."""
    with onload(root) as found:
        before = [{name: [part.clone() for part in _parts(t)] for name, t in v.tensors().items()} for v in found]
        yield
        for visit, old in zip(found, before):
            for name, tensor in visit.tensors().items():
                parts = _parts(tensor)
                if len(parts) != len(old.get(name, ())) or not all(map(have_same_bits, old[name], parts)):
                    visit.keep()
                    break


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that ``tensor`` holds: its values and the row scales of an INT8 weight, or those in quantized experts."""
    import torch

    if is_quantized_experts(tensor):
        return list(tensor.packed.tensors().values())  # type: ignore[attr-defined]
    scales = row_scales.get_scales(tensor)
    return [t.detach().as_subclass(torch.Tensor) for t in (tensor, scales) if t is not None]


def is_trainable_offloaded(model: Module) -> bool:
    """Tell whether ``model`` is offloaded in part, and no trained parameter is."""
    return is_offloaded(model) and not any(p.is_meta and p.requires_grad for p in model.parameters())
