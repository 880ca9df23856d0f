"""``trainable_token_indices`` on an offloaded embedding has no initial values, and fails in the first forward.

The layer that trains single tokens copies their rows from the base weight when it is made, and each forward puts the
trained rows into a copy of the whole weight. If the embedding is offloaded, the base weight is on meta both times:
``get_peft_model`` makes a parameter on meta, and the first forward raises ``Cannot copy out of meta tensor; no
data!``. ``peft-adapters-on-meta`` repairs ``TrainableTokensConfig``; ``LoraConfig`` and similar configurations wrap
the embedding in another way, which this patch repairs. peft >= 0.15, which added it.

The repair makes the layer while the base weight is on the execution device, and brings the weight for the whole of
each forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...adapters import hold_base_weights
from ...engine import Finding, Patch, SetAttribute
from ...offload import offloaded_modules


def _make(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not offloaded_modules.is_offloaded(self):
            return original(self, *args, **kwargs)
        with offloaded_modules.onload_to_change(self):
            result = original(self, *args, **kwargs)
        hold_base_weights.hold_base_weights(self)
        return result

    return update_layer


def defect() -> Finding:
    """Train one token of an embedding that accelerate keeps in CPU memory."""
    import torch
    from accelerate import cpu_offload
    from peft import LoraConfig, get_peft_model

    model = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4))
    cpu_offload(model[0], execution_device=torch.device("cpu"))
    config = LoraConfig(r=2, target_modules=["1"], trainable_token_indices={"0": [1]})
    try:
        model = get_peft_model(model, config)
        model(torch.arange(4)).sum().backward()
    except (NotImplementedError, RuntimeError) as error:
        return Finding(True, f"forward: {error}")
    trained = model.base_model.model[0].token_adapter.trainable_tokens_delta["default"].grad
    return Finding(trained is None, "the token is trained" if trained is not None else "no gradient")


PATCH = Patch(
    id="peft-trainable-tokens-offloaded",
    summary="trainable_token_indices on an offloaded embedding fails in the first forward",
    links=("https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/trainable_tokens/layer.py",),
    requires=("peft>=0.15", "accelerate>=0.26.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(
        SetAttribute(
            "peft.tuners.trainable_tokens.layer:TrainableTokensLayer.update_layer",
            make=_make,
            over="self._move_adapter_to_device_of_base_layer(adapter_name)",
        ),
    ),
    defect=defect,
)
