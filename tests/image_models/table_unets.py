"""UNets and what steers them."""

from __future__ import annotations

import torch

from .tiny import WIDTH, Draw, Inputs, Tiny, step


def sample(draw: Draw, channels: int = 4, **also: object) -> Inputs:
    """An image of eight by eight latents, and eight tokens of text."""
    return {
        "sample": draw(1, channels, 8, 8),
        "timestep": step(),
        "encoder_hidden_states": draw(1, 8, WIDTH),
        **also,
    }


def _video(draw: Draw, **also: object) -> Inputs:
    return sample(draw) | {"sample": draw(1, 4, 2, 8, 8), **also}


def _motion(draw: Draw, **also: object) -> Inputs:
    return _video(draw, encoder_hidden_states=draw(2, 8, WIDTH), **also)  # a text for each frame


def _blocks(kind: str) -> dict[str, object]:
    down, up = ((f"CrossAttn{way}Block{kind}", f"{way}Block{kind}") for way in ("Down", "Up"))
    return {"down_block_types": down, "up_block_types": up[::-1], "attention_head_dim": 4}


def _cond(draw: Draw, **also: object) -> Inputs:
    return sample(draw, controlnet_cond=draw(1, 3, 64, 64), **also)


_DOWN = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 4}

_NAMES = "it is given models, and saves each by itself"

TABLE: dict[str, Tiny | str] = {
    "FluxMultiControlNetModel": _NAMES,
    "HunyuanDiT2DMultiControlNetModel": _NAMES,
    "MultiControlNetModel": _NAMES,
    "MultiControlNetUnionModel": _NAMES,
    "QwenImageMultiControlNetModel": _NAMES,
    "SD3MultiControlNetModel": _NAMES,
    "ControlNetXSAdapter": "it has no forward of its own: UNetControlNetXSModel runs it",
    "MotionAdapter": "it has no forward of its own: UNetMotionModel runs it",
    "I2VGenXLUNet": Tiny(
        lambda draw: _video(draw, fps=torch.tensor([8]), image_latents=draw(1, 4, 2, 8, 8), image_embeddings=draw(1, WIDTH)),
        _blocks("3D"),
    ),
    "Kandinsky3UNet": Tiny(
        lambda draw: sample(draw, encoder_attention_mask=torch.ones(1, 8)),
        {"block_out_channels": (32, 64, 128, 256), "groups": 8, "layers_per_block": 2, "time_embedding_dim": WIDTH},
    ),
    "StableCascadeUNet": Tiny(
        lambda draw: {"sample": draw(1, 16, 8, 8), "timestep_ratio": step(0.5), "clip_text_pooled": draw(1, 1, WIDTH)},
        {"conditioning_dim": WIDTH, "num_attention_heads": (4, 4), "down_num_layers_per_block": (1, 1),
         "up_num_layers_per_block": (1, 1), "clip_text_pooled_in_channels": WIDTH, "dropout": (0.0, 0.0)},
    ),
    "UVit2DModel": Tiny(
        lambda draw: {"input_ids": draw.below(16, 1, 8, 8), "encoder_hidden_states": draw(1, 8, WIDTH),
                      "pooled_text_emb": draw(1, WIDTH), "micro_conds": draw(1, 5)},
        {"cond_embed_dim": WIDTH, "micro_cond_encode_dim": 32, "micro_cond_embed_dim": 160, "vocab_size": 17, "codebook_size": 16,
         "in_channels": WIDTH, "block_out_channels": WIDTH, "num_res_blocks": 1, "block_num_heads": 4},
    ),
    "UNet1DModel": "it has no linear layer that holds more than a few values",
    "DreamLiteUNetModel": Tiny(
        sample,
        {"down_block_types": ("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
         "up_block_types": ("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"), "attention_head_dim": 4, "num_kv_heads": 1},
    ),
    "SparseControlNetModel": Tiny(
        lambda draw: _motion(draw, controlnet_cond=draw(1, 4, 2, 8, 8), conditioning_mask=torch.ones(1, 1, 2, 8, 8)),
        {"down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"), "attention_head_dim": 4,
         "motion_num_attention_heads": 4, "conditioning_embedding_out_channels": (16, 16)},
    ),
    "ControlNetUnionModel": Tiny(
        lambda draw: sample(draw, controlnet_cond=[draw(1, 3, 64, 64)], control_type=torch.tensor([[1.0, 0, 0, 0, 0, 0]]),
                            control_type_idx=[0], conditioning_scale=[1.0],
                            added_cond_kwargs={"time_ids": torch.ones(1, 6), "text_embeds": draw(1, WIDTH)}),
        _DOWN | {"conditioning_embedding_out_channels": (16, 16, 16, 16), "num_trans_channel": WIDTH, "num_proj_channel": WIDTH,
                 "addition_embed_type": "text_time", "addition_time_embed_dim": 32,
                 "projection_class_embeddings_input_dim": 256},
    ),
    "UNetControlNetXSModel": Tiny(
        _cond,
        {**{name: value for name, value in _blocks("2D").items() if name != "attention_head_dim"}, "num_attention_heads": 4,
         "ctrl_conditioning_embedding_out_channels": (16, 16, 16, 16), "ctrl_block_out_channels": (32, 32),
         "ctrl_num_attention_heads": 4, "ctrl_max_norm_num_groups": 8},
    ),
    "UNet2DConditionModel": Tiny(sample, _blocks("2D")),
    "UNet2DConditionModel (SDXL)": Tiny(
        lambda draw: sample(draw, added_cond_kwargs={"text_embeds": draw(1, WIDTH), "time_ids": torch.ones(1, 6)}),
        _blocks("2D") | {"addition_embed_type": "text_time", "addition_time_embed_dim": 32, "use_linear_projection": True,
                         "projection_class_embeddings_input_dim": 256},
    ),
    "UNet2DConditionModel (Kandinsky 2.2)": Tiny(
        lambda draw: sample(draw, encoder_hidden_states=None, added_cond_kwargs={"image_embeds": draw(1, WIDTH)}),
        _blocks("2D") | {"encoder_hid_dim_type": "image_proj", "encoder_hid_dim": WIDTH, "addition_embed_type": "image"},
    ),
    "UNet3DConditionModel": Tiny(_video, _blocks("3D")),
    "UNetMotionModel": Tiny(
        _motion, {name: value for name, value in _blocks("Motion").items() if name != "attention_head_dim"}
        | {"num_attention_heads": 4, "motion_num_attention_heads": 4, "block_out_channels": (64, 64)},
    ),
    "UNet2DModel": Tiny(
        lambda draw: {"sample": draw(1, 3, 8, 8), "timestep": step()},
        {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
    ),
    "ControlNetModel": Tiny(_cond, _DOWN | {"conditioning_embedding_out_channels": (16, 16, 16, 16)}),
    "UNetSpatioTemporalConditionModel": Tiny(
        lambda draw: sample(draw) | {"sample": draw(1, 2, 8, 8, 8), "added_time_ids": torch.ones(1, 3)},
        {"down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
         "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), "num_frames": 2,
         "addition_time_embed_dim": 32, "projection_class_embeddings_input_dim": 96, "num_attention_heads": (4, 4)},
    ),
}  # fmt: skip
