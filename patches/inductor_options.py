"""Inductor options for one ``torch.compile``, checked, and delivered so that the backward gets them too.

``torch._inductor.config.x = y`` is per thread since torch 2.12: a backward that autograd compiles in its own
thread (it does on CUDA) never sees it, and the ``mode`` of ``torch.compile`` overrides it. Options given to
``torch.compile(options=...)`` travel with the compiled function. transformers has no field for them, and
torch refuses them together with a ``mode``; so the two are merged here.

The allowlist is axolotl's, https://github.com/axolotl-ai-cloud/axolotl/pull/3692 .
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from .engine.edits import Edit, Rewrite, SetAttribute
from .engine.imports import imported
from .engine.patch import Feature

ALLOWED = (
    "assume_aligned_inputs",
    "comprehensive_padding",
    "coordinate_descent_check_all_directions",
    "coordinate_descent_tuning",
    "decompose_mem_bound_mm",
    "epilogue_fusion",
    "fx_graph_cache",
    "max_autotune_gemm",
    "shape_padding",
    "triton.cudagraphs",
)
"""Options that change speed and memory, not results; in every torch from 2.6 on."""

_CUDAGRAPHS = "triton.cudagraphs"


class CompileOptions(Mapping[str, Any]):
    """The arguments of ``torch.compile(**options)``, and a context manager that hands them to the calls of others.

    Made by :func:`patches.compile_options`. Immutable; may be entered again, and in several threads.
    """

    def __init__(self, chosen: Mapping[str, Any], mode: str | None, dynamic: bool | None, packing: bool) -> None:
        self.chosen = dict(chosen)
        self.mode = mode
        self.dynamic = dynamic
        self.sample_packing = packing

    def __getitem__(self, key: str) -> Any:
        return self._arguments()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments())

    def __len__(self) -> int:
        return len(self._arguments())

    def __repr__(self) -> str:
        return f"compile_options({self.chosen}, mode={self.mode!r}, dynamic={self.dynamic!r})"

    def _arguments(self) -> dict[str, Any]:
        # A new dict each time: torch.compile takes keys out of the one it is given.
        arguments: dict[str, Any] = {"options": self.merged()}
        return arguments if self.dynamic is None else {**arguments, "dynamic": self.dynamic}

    def merged(self, mode: str | None = None, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Merge the options of the mode, ours, and the options of the call itself; the later ones override.

        ``mode`` and ``options`` are the arguments of the call of ``torch.compile``. Its mode overrides ours, unless it is
        "default".
        """
        named = mode if mode not in (None, "default") else self.mode
        return {**_mode_options(named), **self.chosen, **(options or {})}

    def plugin(self, **fields: Any) -> Any:
        """Make an ``accelerate.utils.TorchDynamoPlugin`` with Inductor on, for ``Accelerator(dynamo_plugin=...)``.

        ``fields`` are others of its fields (``fullgraph``, ``dynamic``, ``use_regional_compilation``).

        Raises
        ------
        ValueError
            ``fields`` has ``mode`` or ``options``, which belong to ``compile_options``, or a backend other than Inductor.
        """
        from accelerate.utils import TorchDynamoPlugin

        if taken := {"mode", "options"} & fields.keys():
            raise ValueError(
                f"pass {' and '.join(sorted(taken))} to patches.compile_options() instead, which merges them"
            )
        if str(fields.setdefault("backend", "inductor")).rpartition(".")[2].lower() != "inductor":
            raise ValueError(
                f"backend={fields['backend']!r}: compile_options() sets options of Inductor; leave backend out"
            )
        fields.setdefault("dynamic", self.dynamic)
        self._warn(fields["dynamic"], fields.get("mode"), {})
        return TorchDynamoPlugin(options=self.merged(), **fields)

    def __enter__(self) -> CompileOptions:
        from .process_registry import REGISTRY

        entry = _Entry(self, _feature())
        REGISTRY.hold(entry.feature, entry)  # until `entry` is released, or is gone
        _entered.set((*_entered.get(), entry))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        from .process_registry import REGISTRY

        *outer, entry = _entered.get()
        _entered.set(tuple(outer))
        for problem in REGISTRY.release(entry.feature, entry):
            warnings.warn(problem, stacklevel=2)
        if kind is None and not entry.reached:
            raise RuntimeError(
                f"{self!r} had no effect, because Inductor compiled nothing inside the `with` block. Call torch.compile "
                "inside it, or the method that compiles: Trainer.train(), Accelerator.prepare()"
            )

    def _warn(self, dynamic: bool | None, mode: str | None, options: Mapping[str, Any]) -> None:
        if not self.merged(mode, options).get(_CUDAGRAPHS):
            return
        causes = {"sample packing": self.sample_packing, "dynamic shapes": dynamic}
        if found := [cause for cause, there in causes.items() if there]:
            warnings.warn(
                f"{_CUDAGRAPHS} with {' and '.join(found)}: each shape records a CUDA graph, which keeps its memory. "
                f"Pad to a few lengths, or leave {_CUDAGRAPHS} out",
                stacklevel=3,
            )


def compile_options(
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    *,
    dynamic: bool | None = None,
    sample_packing: bool = False,
) -> CompileOptions:
    """See :func:`patches.compile_options`."""
    chosen = dict(options or {})
    _check(chosen)
    _mode_options(mode)
    result = CompileOptions(chosen, mode, dynamic, sample_packing)
    result._warn(dynamic, None, {})
    return result


def _check(chosen: Mapping[str, Any]) -> None:
    from torch._inductor import config, list_options

    installed = set(list_options())
    types = {name: _declared(config, name) for name in ALLOWED if name in installed}
    allowed = ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items())
    for name, value in chosen.items():
        if name not in types:
            why = "the installed torch does not have it" if name in ALLOWED else "unknown"
            raise ValueError(f"option {name!r}: {why}; allowed are {allowed}")
        if not isinstance(value, types[name]):
            given = f"{value!r} is of type {type(value).__name__}"
            raise TypeError(f"option {name!r}: {given}, not {types[name].__name__}; allowed are {allowed}")


def _declared(config: Any, name: str) -> type:
    """Return the type that torch declares for an option, or else the type of its value."""
    return config.get_type(name) if hasattr(config, "get_type") else type(config.get_config_copy()[name])


def _mode_options(mode: str | None) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    known = list_mode_options()
    if mode is not None and mode not in known:
        raise ValueError(f"mode {mode!r}: allowed are {', '.join(known)}")
    return dict(known[mode]) if mode else {}


# -- the context: what reaches the torch.compile calls of others ------------------------------------


class _Entry:
    """One `with`: its options, and whether a compilation took them."""

    def __init__(self, options: CompileOptions, feature: Feature) -> None:
        self.options = options
        self.feature = feature
        self.reached = False


_entered: ContextVar[tuple[_Entry, ...]] = ContextVar("patches_compile_options", default=())


def _deliver(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Put the entered options into the class in which ``torch.compile`` keeps mode and options for Inductor."""

    def make(mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None, *rest: Any) -> Any:
        for entry in reversed(_entered.get()):  # the innermost first: its options override the outer ones
            entry.reached = True
            entry.options._warn(dynamic, mode, options or {})
            mode, options = None, entry.options.merged(mode, options)
        return wrapper(mode, options, dynamic, *rest)

    return make


def _require_inductor_backend(original: Any) -> Any:
    def prepare_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        backend = str(self.state.dynamo_plugin.backend.value).lower()
        entered = _entered.get()
        if entered and backend != "inductor" and not any(entry.reached for entry in entered):
            raise RuntimeError(
                f"{entered[-1].options!r} has no effect, because accelerate does not compile with Inductor (its dynamo "
                f"backend is {backend!r}): set TrainingArguments(torch_compile=True) or Accelerator(dynamo_backend='inductor')"
            )
        return original.__get__(self)(model, *args, **kwargs)

    return prepare_model


def _feature() -> Feature:
    """Return the edits that are in while a `with` is entered; in contexts that entered none they do nothing."""
    import torch  # noqa: F401  (the edits need it imported)

    return _feature_with(accelerate=imported("accelerate.accelerator"))


@functools.cache
def _feature_with(accelerate: bool) -> Feature:
    edits: list[Edit] = [
        Rewrite.to_call("torch:compile", "_TorchCompileInductorWrapper", _deliver, "_TorchCompileInductorWrapper")
    ]
    if accelerate:  # fail early, in prepare_model; without it the end of the `with` fails
        target = "accelerate.accelerator:Accelerator.prepare_model"
        edits.append(SetAttribute(target, make=_require_inductor_backend, original_contains="self.state.dynamo_plugin"))
    return Feature("compile-options", "torch.compile inside `with compile_options()` uses its options", tuple(edits))
