"""A tiny configuration of any architecture: the sizes of its fields, by their names, and of the configurations in it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

WIDTH, VOCABULARY = 64, 256
SIZES = {
    # width
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim",
                     "encoder_hidden_size", "decoder_hidden_size", "projection_dim", "out_hidden_size", "output_dim",
                     "text_embed_dim", "vision_embed_dim", "proj_hidden_size", "mm_hidden_size", "fpn_hidden_size",
                     "prediction_hidden_size", "joint_hidden_size", "cross_attention_dim", "emb_dim", "classifier_proj_size",
                     "bottleneck_dim", "conv_dim_out", "true_hidden_size", "projector_hidden_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim",
                     "ffn_hidden_size", "d_inner", "mlp_hidden_size", "linear_units", "text_ffn_dim"), 2 * WIDTH),
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
                     "num_decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers", "depth",
                     "num_encoder_layers", "num_attention_layers", "n_head_layers", "text_layers", "vision_layers"), 2),
    "num_mem_blocks": 1, "num_adapter_layers": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads",
                     "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "kv_channels"), 16),
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "rotary_dim": 8, "attention_window": 16, "sliding_window": 16, "index_head_dim": 16, "index_n_heads": 2,
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_selected_experts", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
                     "moe_shared_expert_intermediate_size"), WIDTH),
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    # state spaces and linear attention
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "mamba_d_head", "mamba_head_dim",
                     "linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "mamba_n_heads", "mamba_num_heads", "laurel_rank"), 8),
    "mamba_expand": 2, "n_groups": 1, "mamba_n_groups": 1, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "num_kv_shared_layers": 0, "mamba_d_ssm": 2 * WIDTH,
    # tokens
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size", "decoder_vocab_size",
                     "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 128),
    "max_source_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "num_codebooks": 1,
    # images and sound
    "image_size": 32, "patch_size": 8, "num_mel_bins": 16, "window_size": 4, "num_query_tokens": 4, "num_queries": 4,
    "num_position_embeddings": 16, "max_length": 64, "frequency_stride": 8, "time_stride": 8,
    "hidden_dim": WIDTH, "max_pos_emb": 64, "context_size": 8, "audio_hidden_size": WIDTH, "text_hidden_size": WIDTH,
}  # fmt: skip
LISTS = {"depths": 1, "layers": 1, "num_heads": 2, "num_attention_heads": 2, "hidden_sizes": 32, "embed_dims": 32,
         "num_conv_pos_embeddings": 16, "conv_dim": 16, "tdnn_dim": 16}  # fmt: skip
"""What each number of a list becomes."""
LEFT = object()
"""A field that is left as it is."""
KINDS = object()
"""One layer of each kind that the model has by default."""
HARDER: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_heads": 8, "num_experts_per_tok": 1, "head_dim": 16, "is_decoder": True},
    {"num_key_value_heads": 4, "head_dim": 16},
    {"layer_types": KINDS, "layers_block_type": KINDS},
    dict.fromkeys(("head_dim", "kv_channels", "attention_head_size"), LEFT),
    dict.fromkeys(("image_size", "patch_size", "window_size"), LEFT),
    {"layer_types": ["full_attention", "full_attention"]},
    dict.fromkeys(("head_dim", "image_size", "patch_size", "window_size", "embed_dim", "output_dim", "dim"), LEFT),
)
"""What is done otherwise, one after the other, where a model with all fields tiny cannot be built or run."""
DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def configurations(kind: Any) -> Iterator[Callable[[], Any]]:
    """What makes tiny configurations of the class ``kind``, until one of them makes a model that runs."""
    for otherwise in HARDER:
        yield functools.partial(_made, kind, otherwise)


def _made(kind: Any, otherwise: dict[str, Any]) -> Any:
    return configuration(kind, otherwise) or kind()


def configuration(kind: Any, otherwise: dict[str, Any]) -> Any:
    """A tiny configuration of the class ``kind``; None if it has no field to make smaller."""
    default = kind()
    given: dict[str, Any] = {}
    fields = _fields(kind)
    for name in fields:
        value = _value(default, name)
        change = otherwise.get(name)
        if change is LEFT or name == "is_decoder" and change is None:
            continue
        if change is KINDS:
            if isinstance(value, (list, tuple)):
                given[name] = list(dict.fromkeys(value))
                given |= {depth: len(given[name]) for depth in DEPTHS if depth in fields}
        elif change is not None:
            given[name] = change
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            if (made := configuration(type(value), otherwise)) is not None:
                given[name] = made
        elif not isinstance(value, bool) and (size := _size(name, value)) is not None:
            given.setdefault(name, size)
    if "qk_rope_head_dim" in given and "head_dim" not in otherwise:
        given.pop("head_dim", None)
    return kind(**given, **_tokens(default, given)) if given else None


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001  (a value of each layer: there is none of all)
        return None


def _size(name: str, value: Any) -> Any:
    if name in ("attention_types", "default_language"):
        return {"attention_types": [[["global", "local"], 1]], "default_language": "en_XX"}[name]
    if name in LISTS and isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
        if name == "hidden_sizes":
            return [32 * 2**at for at in range(len(value))]
        return [LISTS[name]] * len(value)
    return SIZES[name] if name in SIZES and (value is None or isinstance(value, int)) else None


def _fields(kind: Any) -> list[str]:
    names: dict[str, None] = {}
    for cls in kind.__mro__:
        names |= dict.fromkeys(getattr(cls, "__annotations__", {}))
        names |= dict.fromkeys(inspect.signature(cls.__init__).parameters)
    return [name for name in names if not name.startswith("_") and name not in ("self", "args", "kwargs")]


def _tokens(default: Any, given: dict[str, Any]) -> dict[str, int]:
    """Ids of special tokens that a small vocabulary does not have."""
    own = [name for name, value in vars(default).items()
           if name.endswith(("_token_id", "_token_index")) and name not in given
           and isinstance(value, int) and value >= VOCABULARY]  # fmt: skip
    return {name: VOCABULARY - 1 - at for at, name in enumerate(own)}
