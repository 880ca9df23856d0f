"""``from_pretrained(..., load_in_4bit=True)`` raises a ``TypeError`` on transformers 5."""

from __future__ import annotations

import inspect
from typing import Any

from ...engine import Finding, Message, Patch, Rewrite
from ...process.messages import LOGGER
from ..reproducers import tiny_models
from ..reproducers.log_records import record_logs

_SWITCHES = ("load_in_4bit", "load_in_8bit")
_told: set[str] = set()


def quantization_config(kwargs: dict[str, Any]) -> Any:
    """Take the ``quantization_config`` out of ``kwargs``, or make the one that ``load_in_4bit`` and its kin ask for."""
    given = kwargs.pop("quantization_config", None)
    switches = {name: kwargs.pop(name) for name in _SWITCHES if name in kwargs}
    if not any(switches.values()):
        return given
    on = " and ".join(f"{name}=True" for name, value in switches.items() if value)
    if given is not None:
        raise ValueError(
            f"from_pretrained got {on} and a quantization_config, expected one of them. Leave {on} out, "
            f"and pass quantization_config=BitsAndBytesConfig({on})."
        )
    from transformers import BitsAndBytesConfig

    names = inspect.signature(BitsAndBytesConfig).parameters.keys() - {"kwargs"}
    config = BitsAndBytesConfig(**switches, **{name: kwargs.pop(name) for name in names & kwargs.keys()})
    if on not in _told:
        _told.add(on)
        LOGGER.warning(
            "from_pretrained(%s) is deprecated: transformers 5 accepts it with bnb-patches only. "
            "Write quantization_config=BitsAndBytesConfig(%s).",
            on,
            on,
        )
    return config


def defect() -> Finding:
    """Load a tiny Llama in 4 bits as tutorials do."""
    import tempfile

    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder, record_logs():
        tiny_models.save_llama(folder)
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4")
        except TypeError as error:
            return Finding(True, str(error))
    kind = type(model.model.layers[0].mlp.up_proj).__name__
    return Finding(kind != "Linear4bit", f"loaded, with {kind}")


PATCH = Patch(
    id="transformers-load-in-keyword",
    summary="from_pretrained(..., load_in_4bit=True) raises a TypeError on transformers 5",
    groups=("from_pretrained",),
    messages=(
        Message(
            "LlamaForCausalLM.__init__() got an unexpected keyword argument 'load_in_4bit'",
            "torch/lib/libtorch_python.so",
            parts=("got an unexpected keyword argument '",),
        ),
    ),
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py#L4094",),
    why="""
        Tutorials, notebooks and training scripts since 2023 pass ``load_in_4bit=True`` or ``load_in_8bit=True`` to
        ``from_pretrained``, some with ``bnb_4bit_compute_dtype`` and similar arguments. transformers 4 makes a
        ``BitsAndBytesConfig`` of them and logs that this is deprecated. transformers 5 passes them to the class of
        the model: ``LlamaForCausalLM.__init__() got an unexpected keyword argument 'load_in_4bit'``. This also
        happens with ``load_in_4bit=False``, from scripts with a switch. All releases of transformers 5.
    """,
    repair="""
        The repair makes the ``BitsAndBytesConfig``, with its defaults, and a warning says once in each process what to
        write instead. As on transformers 4, giving both this and a ``quantization_config`` is an error.
    """,
    cost="""
        A look at the names of the arguments, once for each model that is loaded.
    """,
    requires=("transformers>=5", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=(
        Rewrite.to_call(
            "transformers.modeling_utils:PreTrainedModel.from_pretrained",
            find="kwargs.pop('quantization_config', None)",
            function=quantization_config,
            arguments="kwargs",
        ),
    ),
    defect=defect,
)
