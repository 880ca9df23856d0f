"""Sizes of tiny models by the names of arguments, and the tables of what a class needs besides: its inputs, and other sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

WIDTH = 64
"""Four heads of 16: a row of a weight is one block of 4 bits, or two where a layer is wider."""
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "dim", "model_dim", "dit_dim", "embed_dim", "token_dim", "d_model", "joint_attention_dim",
                     "pooled_projection_dim", "text_embed_dim", "text_dim", "caption_channels", "cross_attention_dim",
                     "cross_attention_head_dim", "caption_projection_dim", "cap_feat_dim", "condition_dim", "context_in_dim",
                     "text_in_dim", "text_emb_dim", "encoder_hidden_size", "in_text_dim", "in_text_dim2", "time_dim",
                     "text_hidden_dim", "llm_features_dim", "adaln_dim", "adaln_lora_dim", "freq_dim", "time_embed_dim",
                     "timestep_embed_dim", "time_embed_hidden_dim", "time_step_dim", "timestep_channels",
                     "timestep_guidance_channels", "encoder_hid_dim", "embedding_dim", "audio_cross_attention_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "ff_dim", "d_ff", "ff_inner_dim"), 2 * WIDTH),
    **dict.fromkeys(("num_layers", "num_single_layers", "num_refiner_layers", "n_layers", "n_refiner_layers", "depth",
                     "num_text_blocks", "num_visual_blocks", "dit_depth", "perceiver_num_layers", "num_hidden_layers",
                     "nlayers", "layers_per_block", "num_mmdit_layers", "num_single_dit_layers", "transformer_num_layers",
                     "mmdit_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_kv_heads", "nheads", "dit_heads",
                     "audio_num_attention_heads", "num_cross_attention_heads"), WIDTH // 16),
    **dict.fromkeys(("attention_head_dim", "head_dim", "audio_attention_head_dim", "d_kv", "cross_attention_head_dim"), 16),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_key_value_attention_heads"), 2),
    **dict.fromkeys(("axes_dims_rope", "axes_dim_rope", "rope_axes_dim", "axes_dims", "rope_dim", "rope_dim_list"), (4, 4, 8)),
    **dict.fromkeys(("sample_size", "sample_height", "sample_width", "pos_embed_max_size", "text_len", "text_len_t5"), 8),
    "rope_max_seq_len": 64, "sample_frames": 1, "axes_lens": (64, 64, 64), "multiple_of": 32, "vocab_size": 64,
    "block_out_channels": (64, 64), "norm_num_groups": 8,
}  # fmt: skip
"""What an argument becomes that has a default other than None."""
Inputs = dict[str, Any]


class Tiny(NamedTuple):
    """What a class is built with besides ``SIZES``, and what makes its inputs; or why there is none."""

    inputs: Callable[[Draw], Inputs]
    sizes: dict[str, Any] = {}  # noqa: RUF012  (never changed)

    def build(self, kind: Any) -> Any:
        """A model of the class ``kind`` in float32, the same each time."""
        torch.manual_seed(0)
        names = inspect.signature(kind.__init__).parameters
        own = {name: size for name, size in SIZES.items() if name in names and names[name].default is not None}
        return kind(**{**own, **self.sizes}).eval()


class Draw:
    """Random tensors of given shapes, the same each time."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(1)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def below(self, limit: int, *shape: int) -> torch.Tensor:
        """Draw whole numbers."""
        return torch.randint(limit, shape, generator=self._generator)


def step(value: float = 1.0) -> torch.Tensor:
    """One step of the schedule."""
    return torch.tensor([value])


def mask(*shape: int) -> torch.Tensor:
    """A mask that hides nothing."""
    return torch.ones(*shape, dtype=torch.bool)


def grid(*sides: int) -> torch.Tensor:
    """The position of each place of a grid, a row each."""
    return torch.cartesian_prod(*(torch.arange(side) for side in sides)).float().view(-1, len(sides))
