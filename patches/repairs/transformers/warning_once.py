"""torch.compile splits the model wherever its forward warns through ``logger.warning_once``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers.graphs import show_graphs

ONCE = ("warning_once", "info_once")


def log_now(logger: logging.Logger, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Log the message now if ``name`` logs things once, and tell whether Dynamo may leave the call out.

    ``args`` and ``kwargs`` are Dynamo's variables.
    """
    if name not in ONCE or not hasattr(logger, name):
        return False
    values = (*args, *kwargs.values())
    if all(value.is_python_constant() for value in values):
        constants = {key: value.as_python_constant() for key, value in kwargs.items()}
        getattr(logger, name)(*(value.as_python_constant() for value in args), **constants)
    return True


def defect() -> Finding:
    """Compile a forward that warns through the logger of its transformers module, as the models there do."""
    import torch
    from transformers import logging as transformers_logging

    logger = transformers_logging.get_logger("transformers.models.llama.modeling_llama")

    def forward(x: torch.Tensor) -> torch.Tensor:
        logger.warning_once("`use_cache=True` is incompatible with gradient checkpointing.")
        return x.sin()

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        return show_graphs(forward, torch.zeros(2))
    finally:
        transformers_logging.set_verbosity(before)


PATCH = Patch(
    id="transformers-warning-once",
    summary="torch.compile splits the model wherever its forward warns through logger.warning_once",
    groups=("compile",),
    messages=(
        Message("logging.Logger methods are not supported for non-export cases.", "torch/_dynamo/variables/misc.py"),
    ),
    words=("graph break",),
    links=("https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/variables/misc.py",),
    why="""
        For example, models warn if gradient checkpointing meets ``use_cache=True``, the default of a model that was
        not prepared for training. Dynamo cannot trace methods of a ``logging.Logger`` and breaks the graph at each
        such call: 3 breaks in a checkpointed Llama, an error with ``fullgraph=True``. All releases.
    """,
    repair="""
        While compiling, Dynamo gives the warning itself when it reaches the call, and leaves the call out of the
        graph. The warning is still given once a process, because ``warning_once`` remembers it. If its arguments
        are not known while tracing, the warning is dropped, as with Dynamo's ``ignore_logging_functions``. That
        setting would not be enough: from torch 2.12 on it is kept per thread, so a compilation in another thread
        would not see it.
    """,
    requires=("transformers>=4.53", "torch>=2.6"),
    tested_up_to="5.24.0",
    edits=tuple(
        Rewrite(
            "torch._dynamo.variables.misc:LoggingLoggerVariable.call_method",
            find=is_ignored,
            replace=f"{is_ignored} or _patches_log_now(self.value, name, args, kwargs)",
            names={"_patches_log_now": log_now},
            when=when,
        )
        for is_ignored, when in (
            ("method in ignore_set", "torch>=2.11"),
            ("{method, function}.intersection(torch._dynamo.config.ignore_logger_methods)", "torch<2.11"),
        )
    ),
    defect=defect,
)
