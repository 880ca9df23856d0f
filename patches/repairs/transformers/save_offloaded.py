"""``save_pretrained`` fails for offloaded INT8 models, and for models that were offloaded without a device map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Message, Patch, Rewrite
from ...engine.gate import satisfied
from ...offload import offloaded_state
from ...quantized.int8 import row_scales
from ..reproducers import tiny_models

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def state_dict_of(model: Any, modules: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Return the state dict of ``model``, with values for tensors on meta that transformers would not find.

    ``modules`` is where transformers 4 looks each name up while it writes; it is emptied if that would not find them.
    """
    state: dict[str, Tensor] = model.state_dict()
    away = {name for name, tensor in state.items() if tensor.is_meta}
    int8 = {name for name in away if row_scales.is_int8(state[name])}
    renamed = _is_renamed(model, {name: state[name] for name in away})
    looked_up = _is_looked_up(model) and not renamed
    wanted = int8 if looked_up else away  # transformers knows which of the tensors that it looks up are tied
    offloaded_state.fill_in(model, state, wanted, away)
    if renamed and modules:
        modules.clear()
    if modules:
        modules.update((name, None) for name in state if name not in modules)
    return state


def onload_or_take(upstream: Callable[..., Any], module: Any, name: str, written: dict[str, Any], shard: Any) -> Any:
    """Call ``get_state_dict_from_offload``; take tensors that it does not find (the model's own, statistics) from ``shard``."""
    found = written if module is None else upstream(module, name, written)
    if isinstance(found[name], str):
        found[name] = shard[name]
    return found


def storage_or_object_id(upstream: Callable[..., Any], model: Any, name: str, tensor: Tensor) -> Any:
    """Call ``id_tensor_storage``; return the ``id`` of a parameter on meta, where all addresses are 0."""
    path, _, own = name.rpartition(".")
    parameter = model.get_submodule(path)._parameters.get(own) if tensor.is_meta else None
    return upstream(tensor) if parameter is None else id(parameter)


def _is_looked_up(model: Any) -> bool:
    """Tell whether transformers itself looks up tensors on meta; before 5.15 it does so only for maps of several devices."""
    places = set(getattr(model, "hf_device_map", {}).values())
    return bool({"cpu", "disk"} & places) and (len(places) > 1 or satisfied("transformers>=5.15"))


def _is_renamed(model: Any, away: dict[str, Tensor]) -> bool:
    """Tell whether transformers gives tensors on meta the names of a checkpoint before it looks them up in the model."""
    if not away or satisfied("transformers>=5.14"):
        return False
    if satisfied("transformers<5"):
        return bool(model._checkpoint_conversion_mapping)
    from transformers.core_model_loading import revert_weight_conversion

    return bool(revert_weight_conversion(model, away).keys() != away.keys())


def defect() -> Finding:
    """Save a tiny Llama that is in CPU memory as a whole, and load it again."""
    import tempfile

    import torch
    from accelerate import cpu_offload
    from transformers import LlamaForCausalLM

    model = tiny_models.make_llama(hidden_size=8, intermediate_size=8, vocab_size=8)
    head = model.lm_head.weight.detach().clone()
    cpu_offload(model, execution_device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
        except RuntimeError as error:  # transformers 4.53 takes all that is on meta for shared tensors
            return Finding(True, f"{type(error).__name__}: {str(error).split('[')[0]}")
        same = torch.equal(LlamaForCausalLM.from_pretrained(folder).lm_head.weight, head)
    return Finding(not same, "saved and loaded" if same else "other values were saved")


_SAVE = "transformers.modeling_utils:PreTrainedModel.save_pretrained"

PATCH = Patch(
    id="transformers-save-offloaded",
    summary="save_pretrained fails on offloaded INT8 models, and on models offloaded without a device map",
    groups=("offload", "save"),
    messages=(
        Message("Cannot copy out of meta tensor; no data!", "torch/lib/libtorch_cpu.so"),
        Message(
            "`q_proj.SCB` is neither a parameter, buffer, nor extra state",
            "transformers/modeling_utils.py",
            parts=("SCB` is neither a parameter, buffer, nor extra state",),
            holds=("is neither a parameter, buffer, nor extra state",),
        ),
    ),
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py#L3492",),
    why="""
        If a model has a device map, ``save_pretrained`` looks up each parameter on meta in the map of its hook. The
        row scales of an offloaded INT8 layer are neither parameter nor buffer, and the look-up raises
        ``AttributeError: `q_proj.SCB` is neither a parameter, buffer, nor extra state``. ``cpu_offload``,
        ``disk_offload`` and a layer that was offloaded by itself leave no device map, or one that names one device,
        which transformers before 5.15 treats as none: ``Cannot copy out of meta tensor; no data!``. transformers
        4.53 to 5.24. Before 5.14 transformers also looks up names of the checkpoint that the model does not have
        (Llava, mixtures of experts): ``has no attribute `language_model```. Tied weights that are offloaded are
        written twice after a forward, because accelerate gives each module a parameter of its own.
    """,
    repair="""
        In these cases the repair builds the state dict module by module. It brings each module from where it is
        offloaded and copies it to CPU memory, which must hold all of them. Models that could be saved before are
        saved as before, one shard at a time.

        transformers 4 also looks up tensors that belong to the model itself and to no module (``KeyError:
        'final_logits_bias'`` in BART, Pegasus and Marian), and quantization states whose weight is in another shard.
        The repair saves both as they are. transformers 4.53 takes all meta tensors of one size for one tensor, and
        leaves out weights such as an ``lm_head`` that is not tied. The repair saves these weights, too.
    """,
    requires=("transformers>=4.53", "accelerate>=0.26.1"),
    tested_up_to="5.24.0",
    edits=(
        *(
            Rewrite.to_call(_SAVE, "model_to_save.state_dict()", state_dict_of, given, when)
            for given, when in (("model_to_save", "transformers>=5"), ("model_to_save, module_map", "transformers<5"))
        ),
        Rewrite.to_call(
            _SAVE,
            find="get_state_dict_from_offload(module, module_name, shard_state_dict)",
            function=onload_or_take,
            arguments="get_state_dict_from_offload, module, module_name, shard_state_dict, shard",
            when="transformers<5",
        ),
        Rewrite.to_call(
            _SAVE,
            find="id_tensor_storage(tensor)",
            function=storage_or_object_id,
            arguments="id_tensor_storage, self, name, tensor",
            when="transformers<4.54",
        ),
    ),
    defect=defect,
)
