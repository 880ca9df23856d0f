"""An optimizer override is applied to parameters that it was not made for."""

from __future__ import annotations

import contextlib
import weakref
from collections import ChainMap
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from ....engine import Finding, Part, Patch, Rewrite
from ....optimizers.parameter_overrides import BY_PARAMETER
from ....quantized.layer_methods import wrap_method
from ...reproducers.training import take_steps

if TYPE_CHECKING:
    from bitsandbytes.optim import GlobalOptimManager
    from torch import Tensor
    from torch.nn import Module

Entry = tuple[Any, str, dict[str, Any]]


def _ours(reference: Any) -> None:
    """Mark a weak reference as ours: no other has this very callback, and torch.compile can read it."""


class _Forget:
    """Callback of a weak reference of ours that removes the override of a parameter that is gone."""

    def __init__(self, configs: dict[int, Any], key: int) -> None:
        self._configs, self._key = configs, key

    def __call__(self, reference: Any) -> None:
        _with_override.pop(self._key, None)
        self._configs.pop(self._key, None)


_with_override: dict[int, weakref.ref[Tensor]] = {}


def not_ours(references: list[Any]) -> list[Any]:
    """Return the weak references for which torch refuses to swap two tensors."""
    return [r for r in references if r.__callback__ is not _ours and not isinstance(r.__callback__, _Forget)]


class _Registered:
    """Stands for a module among the registered ones, and keeps nothing alive.

    A parameter may outlive the module that had it, and keeps its override then.
    """

    def __init__(self, module: Module, name: str) -> None:
        parameter = getattr(module, "_parameters", {}).get(name)
        self._module = weakref.ref(module)
        self._parameter = self._module if parameter is None else weakref.ref(parameter, _ours)

    def is_gone(self) -> bool:
        return self._module() is None and self._parameter() is None

    def __getattr__(self, name: str) -> Any:
        """Return what an optimizer asks for: the parameter that the module has now."""
        import torch

        module = self._module()
        if module is not None:
            return getattr(module, name)
        parameter = self._parameter()
        return torch.empty(0) if parameter is None else parameter  # in no optimizer


def alive_entries(entries: list[Entry]) -> list[Entry]:
    """Return the registered modules without the ones that are gone; another thread may register meanwhile."""
    return [entry for entry in [*entries] if not (isinstance(entry[0], _Registered) and entry[0].is_gone())]


def register(manager: GlobalOptimManager, module: Module, name: str, config: dict[str, Any]) -> None:
    """Note ``config`` for the parameter ``name`` of ``module``, as long as one of both is alive."""
    entries = manager.module_weight_config_triple
    for entry in [*entries]:
        if not alive_entries([entry]):
            with contextlib.suppress(ValueError):  # by another thread
                entries.remove(entry)
    entries.append((_Registered(module, name), name, config))


def register_copy(embedding: Any, setstate: Callable[..., None], state: dict[str, Any]) -> None:
    """Run ``__setstate__`` of a copied or unpickled ``embedding``, and register it as its constructor does."""
    from bitsandbytes.optim import GlobalOptimManager

    setstate(state)
    GlobalOptimManager.get_instance().register_module_override(embedding, "weight", {"optim_bits": 32})


def forget_with(parameter: Tensor, configs: dict[int, Any]) -> None:
    """Before ``configs`` gets an entry for the ``id()`` of ``parameter``, see that it goes with the parameter."""
    import torch

    key = id(parameter)
    if key not in configs and not torch.compiler.is_compiling():  # Dynamo cannot follow
        _with_override[key] = weakref.ref(parameter, _Forget(configs, key))


def is_noted(parameter: Tensor, configs: dict[int, Any]) -> bool:
    """Tell whether ``configs`` has an entry for ``parameter``. If not, it gets one next, which goes with the parameter."""
    forget_with(parameter, configs)
    return id(parameter) in configs


def own_override(given: dict[str, Any], is_callers: bool) -> MutableMapping[str, Any]:
    """Return the override ``given`` as a dict of one parameter. The caller may go on to write into its dict."""
    return ChainMap({}, given) if is_callers else dict(given)


def defect_model_that_is_gone() -> Finding:
    """Train two models with an embedding, then one without, and look for traces of the first two."""
    import gc

    import torch
    from bitsandbytes.nn import StableEmbedding
    from bitsandbytes.optim import Adam8bit

    embeddings = []
    for _ in range(2):
        model = torch.nn.Sequential(StableEmbedding(64, 64), torch.nn.Linear(64, 64))
        embeddings.append(weakref.ref(model[0].weight))
        take_steps(Adam8bit(model.parameters()), model, x=torch.arange(8))
        del model
    gc.collect()
    alive = sum(weight() is not None for weight in embeddings)
    layer = torch.nn.Linear(64, 64)
    optimizer = Adam8bit(layer.parameters())
    take_steps(optimizer, layer)
    dtype = optimizer.state[layer.weight]["state1"].dtype
    return Finding(
        alive > 0 or dtype != torch.uint8,
        f"{alive} of 2 deleted embeddings in memory; 8-bit state of the next model: {dtype}",
    )


def defect_list_of_parameters() -> Finding:
    """Give two layers a learning rate, then the second one 32 bits, and look what the first has."""
    import torch
    from bitsandbytes.optim import Adam8bit, GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    first, second = model.parameters()
    manager.override_config([first, second], "lr", 1e-4)
    manager.override_config(second, "optim_bits", 32)
    manager.register_parameters(model.parameters())
    optimizer = Adam8bit(model.parameters())
    take_steps(optimizer, model)
    dtype = optimizer.state[first]["state1"].dtype
    return Finding(dtype != torch.uint8, f"8-bit state of the other layer: {dtype}")


_MODULE = "bitsandbytes.optim.optimizer"

PATCH = Patch(
    id="bitsandbytes-overrides",
    summary="optimizer overrides outlive their model, and are applied to parameters that they were not made for",
    groups=("train",),
    silent=True,
    words=("OOM (out of memory)",),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1269",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/optim/optimizer.py#L119",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2029",
    ),
    why="""
        Parameters can have their own optimizer configuration. ``Trainer`` (``adamw_8bit`` and similar), peft's
        LoRA+ and the embeddings of ``bitsandbytes.nn`` register 32 bits for embeddings. ``GlobalOptimManager``
        keeps this until the process ends, in three ways: by module, which it keeps alive with everything it refers
        to; by ``id()`` of the parameter, which a new parameter gets once the old one is gone; and by position in
        the optimizer, where the next model has another parameter. If one process trains several models (a notebook,
        a sweep, a test suite), the embeddings of each stay in memory, and other parameters silently get 32-bit
        states or another learning rate. All releases.

        An optimizer override of one parameter is applied to all parameters that were given in the same call.
        ``GlobalOptimManager.override_config`` takes a list of parameters and stores the same dict for each: the one
        that it was given, or one made of ``key`` and ``value``. A later call for one of these parameters writes
        into that dict. So the others get the override too, as does the caller's own dict and every parameter that
        is given it later. Example: some layers have a lower learning rate, then one of them gets 32-bit states; all
        of them get 32-bit states. There is no message. All releases; before 0.50 only if the parameters are
        registered afterwards, because overrides had no effect otherwise.
    """,
    repair="""
        The repair keeps an override as long as its parameter lives. Modules are held weakly, and an override by
        ``id()`` is removed with the parameter. What an optimizer finds by module it stores by parameter only. Since
        0.50 overrides by parameter are looked up beside those by position; earlier releases ignored them (#1269),
        and with the repair they are looked up there too. What ``register_parameters`` stores by position stays,
        because an override follows ``tensor.to(device)`` that way.

        A copy of an embedding of ``bitsandbytes.nn`` does not run the constructor that registers it. Unpatched it
        often had the override of its original by its position in the optimizer. With the repair it is registered
        like its original.

        ``torch.utils.swap_tensors`` refuses tensors that are referred to weakly. It swaps registered parameters as
        before: the override stays with the object.

        For ``override_config``, the repair stores one dict for each parameter. If the caller passed a dict, later
        overrides go into a separate layer above it, so that changes of the caller's dict count as before.
    """,
    cost="""
        Overrides by parameter: nothing in a step from 0.50 on; before 0.50 one dict lookup for each parameter, as in
        later releases.

        One dict for each parameter: nothing in a step of a parameter without override.
    """,
    former_ids=("bitsandbytes-override-outlives-model", "bitsandbytes-override-shared-dict"),
    parts=(
        Part(
            "model that is gone",
            ("bitsandbytes>=0.46.1",),
            "0.50.2",
            (
                Rewrite.to_call(
                    f"{_MODULE}:GlobalOptimManager.register_module_override",
                    "self.module_weight_config_triple.append((module, param_name, config))",
                    register,
                    "self, module, param_name, config",
                ),
                Rewrite.to_call(
                    f"{_MODULE}:GlobalOptimManager.override_config",
                    "id(p) in self.pid2config",
                    is_noted,
                    "p, self.pid2config",
                ),
                Rewrite.to_call(
                    f"{_MODULE}:Optimizer8bit.check_overrides",
                    "self.mng.module_weight_config_triple",
                    alive_entries,
                    "self.mng.module_weight_config_triple",
                ),
                Rewrite(
                    f"{_MODULE}:Optimizer8bit.check_overrides",
                    "self.mng.pid2config[id(p)] = config\nself.mng.index2config[(gindex, pindex)] = self.mng.pid2config[id(p)]",
                    "_patches_forget_with(p, self.mng.pid2config)\n"
                    "self.mng.pid2config[id(p)] = config\n"
                    "self.mng.index2config.pop((gindex, pindex), None)",
                    names={"_patches_forget_with": forget_with},
                ),
                BY_PARAMETER,
                *(
                    Rewrite(
                        "torch.utils:swap_tensors",
                        f"weakref.getweakrefs({swapped})",
                        f"_patches_not_ours(weakref.getweakrefs({swapped}))",
                        names={"_patches_not_ours": not_ours},
                    )
                    for swapped in ("t1", "t2")
                ),
                *(wrap_method(owner, "__setstate__", register_copy) for owner in ("StableEmbedding", "Embedding")),
            ),
            defect_model_that_is_gone,
        ),
        Part(
            "list of parameters",
            ("bitsandbytes>=0.46.1",),
            "0.50.2",
            (
                Rewrite(
                    f"{_MODULE}:GlobalOptimManager.override_config",
                    "self.pid2config[id(p)] = key_value_dict",
                    "self.pid2config[id(p)] = _patches_own(key_value_dict, key is None or value is None)",
                    names={"_patches_own": own_override},
                ),
            ),
            defect_list_of_parameters,
        ),
    ),
)
