"""Repairs quantized fine-tuning (bitsandbytes, transformers, peft, torchao, diffusers) in the running process.

    import patches
    patches.apply()     # calling it again changes nothing; packages imported later follow
    print(patches.report())
    patches.revert()

Distribution name ``bnb-patches``. A patch is applied only to a release that it knows, and only if the code that it
replaces is there. It can be reverted, and has a program that shows its defect (``patches.verify()``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

# Whatever a verb needs: a signal handler may call one while another of the same thread is at its first import.
from . import autoload, pickle_aliases
from . import inductor_options as _compiling
from .engine.patch import CannotShow, Finding, Patch
from .engine.registry import PatchError
from .engine.report import Change, Report, Result, Status
from .experts import quantize_request as _experts
from .inspection import inspect
from .process_registry import REGISTRY
from .ranks import RanksDiffer, check_ranks
from .verification import verify

if TYPE_CHECKING:
    from .experts.quantize_request import QuantizeRequest
    from .inductor_options import CompileOptions

__all__ = [
    "CannotShow",
    "Change",
    "Finding",
    "Patch",
    "PatchError",
    "RanksDiffer",
    "Report",
    "Result",
    "Status",
    "applied",
    "apply",
    "check_ranks",
    "compile_options",
    "inspect",
    "quantize_experts",
    "report",
    "revert",
    "verify",
]

pickle_aliases.put_in()

Model = TypeVar("Model")

revert = REGISTRY.revert
report = REGISTRY.report


def _is_applied(patch_id: str) -> bool:
    return bool(REGISTRY.report(patch_id).with_status(Status.APPLIED))


def apply(*ids: str, strict: bool | None = None, untested: bool | None = None) -> Report:
    """Apply the named patches, or all. Patches of packages that are imported later are applied then.

    Calling it again changes nothing. Each patch is applied whole or not at all. A call that is interrupted makes all its
    changes or none. Patches in ``PATCHES_DISABLE`` are not applied.

    Parameters
    ----------
    ids:
        Ids of patches, such as ``"peft-dora-cache"``; all if there is none.
    strict:
        Try all patches, then raise if one does not fit; by default as ``PATCHES_STRICT`` says.
    untested:
        Also try releases newer than any that a patch was tested on; by default as ``PATCHES_UNTESTED`` says.

    Raises
    ------
    KeyError
        An id is unknown; the message names the nearest. Nothing was changed.
    PatchError
        With ``strict``: a patch met a conflict or failed.
    """
    settings = autoload.read_settings()
    REGISTRY.disabled = settings.disabled
    return REGISTRY.apply(
        *ids,
        strict=settings.strict if strict is None else strict,
        untested=settings.untested if untested is None else untested,
    )


@contextmanager
def applied(*ids: str, strict: bool = True, untested: bool = False) -> Iterator[Report]:
    """Context manager and decorator: the named patches, or all, are applied inside of the block only.

    A patch that was applied before stays applied. Patches in ``PATCHES_DISABLE`` are not applied, as in :func:`apply`.

    Parameters
    ----------
    ids:
        Ids of patches, such as ``"peft-dora-cache"``; all if there is none.
    strict:
        Raise on entry if a patch does not fit.
    untested:
        Also try releases newer than any that a patch was tested on.

    Raises
    ------
    KeyError
        An id is unknown; the message names the nearest. Nothing was changed.
    PatchError
        With ``strict``: a patch met a conflict or failed. What was applied on entry is reverted.
    """
    REGISTRY.disabled = autoload.read_settings().disabled
    with REGISTRY.applied(*ids, strict=strict, untested=untested) as report:
        yield report


@overload
def quantize_experts() -> QuantizeRequest: ...


@overload
def quantize_experts(model: Model) -> Model: ...


def quantize_experts(model: Any = None) -> Any:
    """Quantize the experts of a mixture of experts to 4 bits or INT8, as its ``BitsAndBytesConfig`` says.

    ``load_in_4bit`` and ``load_in_8bit`` quantize linear layers. transformers 5 keeps the experts of a layer in
    parameters of three dimensions (experts, rows, columns), which stay in floating point: most of the model. This
    function replaces each by an ``Experts4bit`` or ``Experts8bit``: a parameter of the same shape and dtype that holds
    packed weights, quantized matrix by matrix as ``Linear4bit`` and ``Linear8bitLt`` do. Products take one expert at a
    time, in the forward pass and again in the backward pass.

    Three ways to ask for it::

        with patches.quantize_experts():        # as they are read: the model is never whole in floating point
            model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config)

        patches.quantize_experts(model)         # of a model that is loaded; returns it

        PATCHES_QUANTIZE_EXPERTS=1 python train.py      # of every model that the program loads quantized

    NF4 or FP4, double quantization, the storage dtype and ``llm_int8_skip_modules`` are taken from the configuration.
    In a loaded model all experts are quantized, or none; experts that are already quantized stay as they are.

    Parameters
    ----------
    model:
        A ``PreTrainedModel`` of transformers 5, loaded with ``BitsAndBytesConfig(load_in_4bit=True)`` or
        ``load_in_8bit=True``. Without it, the call gives a context manager for models that are loaded inside
        of it, in the same thread.

    Raises
    ------
    ValueError
        The model is not quantized, has no such experts, or has experts on the meta device or in another
        dtype; the message names the parameter. Nothing was changed. While loading: experts go to the disk, and
        ``offload_folder`` is not given.
    RuntimeError
        transformers, bitsandbytes or torch are too old; or, from the `with`, the patch that reads experts is not
        applied.
    NotImplementedError
        While loading: the device map sends experts to the disk, and the patch that keeps them there is not applied.
    """
    return _experts.QuantizeRequest(_is_applied) if model is None else _experts.quantize_experts(model)


def compile_options(
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    *,
    dynamic: bool | None = None,
    sample_packing: bool = False,
) -> CompileOptions:
    """Inductor options for ``torch.compile``, checked against the installed torch, which the call imports.

    Three ways to use the result::

        torch.compile(model, **patches.compile_options({"shape_padding": False}, mode="max-autotune"))

        with patches.compile_options({"epilogue_fusion": False}):
            trainer.train()     # or any other code that calls torch.compile, Inductor being on

        Accelerator(dynamo_plugin=patches.compile_options({"max_autotune_gemm": True}).plugin())

    The ``with`` block covers the calls of ``torch.compile`` that are made inside of it by the thread that entered it.
    What these calls return keeps the options, also for functions that are compiled later and in another thread. At the
    end of the block ``torch.compile`` is as before. Inside of the block ``patches.report().features`` has an entry for
    it, and ``patches.revert()`` ends its effect.

    Parameters
    ----------
    options:
        Any of :data:`patches.inductor_options.ALLOWED`, by name.
    mode:
        A mode of ``torch.compile``, which accepts no mode beside options. This call adds the options of the mode;
        where both set the same option, ``options`` counts.
    dynamic:
        As in ``torch.compile``, to which it is passed. It has no effect on a `with`: each call inside passes its own.
    sample_packing:
        True if batches are packed and their shapes vary: ``triton.cudagraphs`` gives a warning, as with dynamic shapes.

    Raises
    ------
    ValueError
        An option that is not allowed or not in the installed torch, or an unknown mode; lists the allowed ones.
    TypeError
        A value of another type than torch declares.
    RuntimeError
        From the `with`: nothing in it was compiled, or accelerate is about to prepare a model uncompiled.
    """
    return _compiling.compile_options(options, mode, dynamic=dynamic, sample_packing=sample_packing)
