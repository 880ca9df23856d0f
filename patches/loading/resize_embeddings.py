"""``resize_token_embeddings`` of a model whose embedding or head waits on the CPU or the disk: an error that says what to do.

transformers reads a weight on meta there, or accelerate brings the old one for the resized module at the next forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..quantized import accelerate_hooks


def resize_unless_offloaded(model: Any) -> Callable[..., Any]:
    """Return ``model._resize_token_embeddings``, which raises if it would change the size of an offloaded weight."""
    upstream: Callable[..., Any] = model._resize_token_embeddings

    def _resize_token_embeddings(count: Any, multiple: Any = None, *also: Any, **options: Any) -> Any:
        if waiting := _offloaded_embeddings(model):
            embeddings = model.get_input_embeddings()
            has = getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0]
            wanted = has if count is None else count
            wanted += -wanted % multiple if isinstance(multiple, int) and multiple > 0 else 0
            if wanted != has:
                where = ", ".join(f"{name!r}: 0" for name in waiting)
                raise ValueError(
                    f"resize_token_embeddings cannot change {' and '.join(map(repr, waiting))} from {has} to {wanted} rows, "
                    f"because the device map offloads {'them' if len(waiting) > 1 else 'it'} to the CPU or the disk. Load "
                    f"the model with device_map={{..., {where}}}. If the device has no room for that, load the model "
                    "without quantization on the CPU, resize it, save it with save_pretrained, and load what was saved."
                )
        return upstream(count, multiple, *also, **options)

    return _resize_token_embeddings


def _offloaded_embeddings(model: Any) -> list[str]:
    """Return the names of the embedding and the head of ``model``, as far as they are offloaded."""
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    waiting = [each for each in modules if getattr(getattr(each, "weight", None), "is_meta", False)]
    waiting = [each for each in waiting if accelerate_hooks.hook_of(each)]
    return [name for name, module in model.named_modules() if module in waiting] if waiting else []
