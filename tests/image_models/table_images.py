"""Models that take latents as an image."""

from __future__ import annotations

import torch

from .tiny import WIDTH, Draw, Inputs, Tiny, mask, step


def image(draw: Draw, channels: int, **also: object) -> Inputs:
    """An image of eight by eight latents, and eight tokens of text."""
    return {
        "hidden_states": draw(1, channels, 8, 8),
        "encoder_hidden_states": draw(1, 8, WIDTH),
        "timestep": step(),
        **also,
    }


def _sizes() -> Inputs:
    return {name: torch.full((1, 2), 64.0) for name in ("original_size", "target_size")} | {
        "crop_coords": torch.zeros(1, 2)
    }


def _list_of_images(draw: Draw) -> Inputs:
    return {"x": [draw(16, 1, 8, 8)], "t": step(0.5), "cap_feats": [draw(8, WIDTH)]}


def _hunyuan_dit(draw: Draw) -> Inputs:
    return image(
        draw, 4, text_embedding_mask=mask(1, 8), encoder_hidden_states_t5=draw(1, 8, WIDTH),
        text_embedding_mask_t5=mask(1, 8), image_meta_size=torch.full((1, 6), 64.0), style=torch.zeros(1, dtype=torch.long),
        image_rotary_emb=[draw(16, 16), draw(16, 16)],
    )  # fmt: skip


def _omnigen(draw: Draw) -> Inputs:
    length = 8 + 1 + 16
    return {
        "hidden_states": draw(1, 4, 8, 8),
        "timestep": step(0.5),
        "input_ids": draw.below(64, 1, 8),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": torch.ones(1, length, length),
        "position_ids": torch.arange(length)[None],
    }


def _pixart(draw: Draw) -> Inputs:
    conditions = {"resolution": None, "aspect_ratio": None}
    return image(draw, 4, added_cond_kwargs=conditions)


TABLE: dict[str, Tiny | str] = {
    "AuraFlowTransformer2DModel": Tiny(lambda draw: image(draw, 4), {"pos_embed_max_size": 16}),
    "BriaFibo2Transformer2DModel": Tiny(
        lambda draw: {"hidden_states": draw(1, 32, 8, 8), "timestep": step(0.5), "encoder_hidden_states": draw(1, 2, 8, WIDTH)},
        {"injection_layer_ids": (0,), "min_num_gist_tokens": 4, "max_num_gist_tokens": 4, "gist_step": 4, "gist_min_text_len": 4,
         "gist_max_text_len": 8},
    ),
    "CogView3PlusTransformer2DModel": Tiny(lambda draw: image(draw, 16, **_sizes())),
    "CogView4Transformer2DModel": Tiny(lambda draw: image(draw, 16, **_sizes()), {"rope_axes_dim": (8, 8)}),
    "DiTTransformer2DModel": Tiny(
        lambda draw: {"hidden_states": draw(1, 4, 8, 8), "timestep": step(), "class_labels": torch.ones(1, dtype=torch.long)},
        {"num_embeds_ada_norm": 8},
    ),
    "DreamLiteTransformer2DModel": Tiny(
        lambda draw: image(draw, 64), {"in_channels": 64, "cross_attention_dim": WIDTH}
    ),
    "ErnieImageTransformer2DModel": Tiny(
        lambda draw: {"hidden_states": draw(1, 64, 8, 8), "timestep": step(), "text_bth": draw(1, 8, WIDTH),
                      "text_lens": torch.tensor([8])},
        {"in_channels": 64, "out_channels": 64, "rope_axes_dim": (4, 4, 8)},
    ),
    "GlmImageTransformer2DModel": Tiny(
        lambda draw: image(draw, 16, prior_token_id=draw.below(8, 1, 16), prior_token_drop=torch.zeros(1, 16, dtype=torch.bool),
                           target_size=torch.full((1, 2), 64.0), crop_coords=torch.zeros(1, 2)),
        {"prior_vq_quantizer_codebook_size": 8},
    ),
    "HunyuanDiT2DModel": Tiny(
        _hunyuan_dit, {"in_channels": 4, "patch_size": 2, "num_layers": 2, "cross_attention_dim_t5": WIDTH}
    ),
    "HunyuanDiT2DControlNetModel": Tiny(
        lambda draw: _hunyuan_dit(draw) | {"controlnet_cond": draw(1, 4, 8, 8)},
        {"in_channels": 4, "patch_size": 2, "transformer_num_layers": 4, "cross_attention_dim_t5": WIDTH},
    ),
    "HunyuanImageTransformer2DModel": Tiny(
        lambda draw: image(draw, 64, encoder_attention_mask=mask(1, 8)), {"rope_axes_dim": (8, 8)}
    ),
    "Lumina2Transformer2DModel": Tiny(lambda draw: image(draw, 16, encoder_attention_mask=mask(1, 8))),
    "LuminaNextDiT2DModel": Tiny(
        lambda draw: image(draw, 4, encoder_mask=mask(1, 8), image_rotary_emb=torch.polar(torch.ones(8, 8, 8), draw(8, 8, 8)), cross_attention_kwargs={}),
        {"num_kv_heads": 4},
    ),
    "OmniGenTransformer2DModel": Tiny(
        _omnigen,
        {"num_key_value_heads": 4, "pad_token_id": 0, "max_position_embeddings": 64, "original_max_position_embeddings": 64,
         "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}},
    ),
    "PRXTransformer2DModel": Tiny(
        lambda draw: image(draw, 16, attention_mask=mask(1, 8)), {"axes_dim": [8, 8]}
    ),
    "PixArtTransformer2DModel": Tiny(_pixart, {"caption_channels": WIDTH, "num_embeds_ada_norm": 8}),
    "SD3Transformer2DModel": Tiny(lambda draw: image(draw, 16, pooled_projections=draw(1, WIDTH))),
    "SD3ControlNetModel": Tiny(
        lambda draw: image(draw, 16, pooled_projections=draw(1, WIDTH), controlnet_cond=draw(1, 16, 8, 8))
    ),
    "SanaTransformer2DModel": Tiny(lambda draw: image(draw, 32)),
    "SanaControlNetModel": Tiny(lambda draw: image(draw, 32, controlnet_cond=draw(1, 32, 8, 8))),
    "Transformer2DModel": Tiny(lambda draw: image(draw, 64), {"in_channels": 64, "cross_attention_dim": WIDTH}),
    "ZImageTransformer2DModel": Tiny(_list_of_images),
    "ZImageControlNetModel": "it has no layers of its own: it takes them from the model that it steers",
}  # fmt: skip
