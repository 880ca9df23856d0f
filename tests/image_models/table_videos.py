"""Models that take latents as a video."""

from __future__ import annotations

import torch

from .tiny import WIDTH, Draw, Inputs, Tiny, mask, step


def video(draw: Draw, channels: int = 16, frames: int = 2, **also: object) -> Inputs:
    """Frames of eight by eight latents, and eight tokens of text."""
    return {
        "hidden_states": draw(1, channels, frames, 8, 8),
        "encoder_hidden_states": draw(1, 8, WIDTH),
        "timestep": step(),
        **also,
    }


def frames_first(draw: Draw, channels: int = 16, frames: int = 2, **also: object) -> Inputs:
    """The same, with frames before channels."""
    return {**video(draw), "hidden_states": draw(1, frames, channels, 8, 8), **also}


def _hunyuan(draw: Draw, **also: object) -> Inputs:
    return video(draw, encoder_attention_mask=mask(1, 8), pooled_projections=draw(1, WIDTH), guidance=step(), **also)


def _hunyuan15(draw: Draw) -> Inputs:
    return video(
        draw, 65, encoder_attention_mask=mask(1, 8), encoder_hidden_states_2=draw(1, 4, WIDTH), encoder_attention_mask_2=mask(1, 4),
        image_embeds=draw(1, 4, WIDTH),
    )  # fmt: skip


def _framepack(draw: Draw) -> Inputs:
    return _hunyuan(draw, image_embeds=draw(1, 4, WIDTH), indices_latents=torch.arange(2), **{
        name: draw(1, 16, 1, 8, 8) for name in ("latents_clean", "latents_history_2x", "latents_history_4x")}, **{
        name: torch.arange(1) for name in ("indices_latents_clean", "indices_latents_history_2x", "indices_latents_history_4x")})  # fmt: skip


def _ltx(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(1, 32, WIDTH),
        "encoder_hidden_states": draw(1, 8, WIDTH),
        "timestep": step(),
        "encoder_attention_mask": mask(1, 8),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


def _ltx2(draw: Draw) -> Inputs:
    return _ltx(draw) | {
        "audio_hidden_states": draw(1, 8, WIDTH),
        "audio_encoder_hidden_states": draw(1, 8, WIDTH),
        "audio_encoder_attention_mask": mask(1, 8),
        "timestep": torch.ones(1, 32),
        "audio_timestep": torch.ones(1, 8),
        "audio_num_frames": 8,
    }


def _kandinsky(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(1, 2, 8, 8, 4),
        "encoder_hidden_states": draw(1, 8, WIDTH),
        "timestep": step(),
        "pooled_projections": draw(1, WIDTH),
        "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(4)],
        "text_rope_pos": torch.arange(8),
    }


def _animate(draw: Draw) -> Inputs:
    return video(
        draw, 36, 3, encoder_hidden_states_image=draw(1, 4, WIDTH), pose_hidden_states=draw(1, 16, 2, 8, 8),
        face_pixel_values=draw(1, 3, 5, 16, 16),
    )  # fmt: skip


def _animate2(draw: Draw) -> Inputs:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return {
        "hidden_states": [draw(16, 2, 8, 8)],
        "timestep": step(),
        "encoder_hidden_states": [draw(8, WIDTH)],
        "condition_latents": [draw(16, 2, 8, 8)],
        "kv_cache": WanAnimate2KVCache(1),
        "kv_cache_mode": "extract",
        "seq_len": 32,
        "encoder_hidden_states_image": draw(1, 4, 1280),
        "offset_grid_sizes": torch.tensor([[2, 4, 4]]),
    }


_LTX = {"in_channels": WIDTH, "out_channels": WIDTH}
_LTX2 = {**_LTX, "audio_in_channels": WIDTH, "audio_out_channels": WIDTH, "caption_channels": WIDTH}

TABLE = {
    "AllegroTransformer3DModel": Tiny(
        lambda draw: video(draw, 4, attention_mask=torch.ones(1, 2, 8, 8), encoder_attention_mask=torch.ones(1, 8),
                           image_rotary_emb=None),
        {"sample_frames": 2},
    ),
    "AnyFlowTransformer3DModel": Tiny(lambda draw: frames_first(draw, timestep=torch.ones(1, 2), r_timestep=torch.zeros(1, 2))),
    "ChronoEditTransformer3DModel": Tiny(video),
    "CogVideoXTransformer3DModel": Tiny(frames_first, {"max_text_seq_length": 8, "sample_frames": 5}),
    "ConsisIDTransformer3DModel": Tiny(frames_first, {"max_text_seq_length": 8, "sample_frames": 5}),
    "CosmosTransformer3DModel": Tiny(
        lambda draw: video(draw, fps=30), {"max_size": (4, 16, 16), "concat_padding_mask": False}
    ),
    "CosmosControlNetModel": "it needs torchvision, which is not installed",
    "EasyAnimateTransformer3DModel": Tiny(video, {"in_channels": 16, "out_channels": 16, "patch_size": 2}),
    "HeliosTransformer3DModel": Tiny(video),
    "HunyuanVideoTransformer3DModel": Tiny(_hunyuan),
    "HunyuanVideo15Transformer3DModel": Tiny(_hunyuan15, {"text_embed_2_dim": WIDTH, "image_embed_dim": WIDTH}),
    "HunyuanVideoFramepackTransformer3DModel": Tiny(_framepack, {"has_image_proj": True, "image_proj_dim": WIDTH, "has_clean_x_embedder": True}),
    "JoyImageEditTransformer3DModel": Tiny(video),
    "JoyImageEditPlusTransformer3DModel": Tiny(
        lambda draw: video(draw) | {"hidden_states": draw(1, 32, 16, 1, 2, 2), "encoder_hidden_states_mask": mask(1, 8),
                                    "shape_list": [[(1, 4, 4), (1, 4, 4)]]},
    ),
    "Kandinsky5Transformer3DModel": Tiny(_kandinsky),
    "LTXVideoTransformer3DModel": Tiny(_ltx, _LTX),
    "LTX2VideoTransformer3DModel": Tiny(_ltx2, _LTX2),
    "LatteTransformer3DModel": Tiny(
        lambda draw: video(draw, 4),
        {"in_channels": 4, "patch_size": 2, "caption_channels": WIDTH, "cross_attention_dim": WIDTH, "video_length": 2,
         "norm_type": "ada_norm_single", "num_embeds_ada_norm": 8, "norm_elementwise_affine": False},
    ),
    "MochiTransformer3DModel": Tiny(lambda draw: video(draw, 12, encoder_attention_mask=mask(1, 8))),
    "MotifVideoTransformer3DModel": Tiny(lambda draw: video(draw, 33, encoder_attention_mask=mask(1, 8))),
    "SanaVideoTransformer3DModel": Tiny(video),
    "SkyReelsV2Transformer3DModel": Tiny(video),
    "WanTransformer3DModel": Tiny(video),
    "WanAnimateTransformer3DModel": Tiny(
        _animate,
        {"image_dim": WIDTH, "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16}, "motion_encoder_size": 16,
         "motion_style_dim": 64, "motion_dim": 4, "motion_encoder_dim": 64, "face_encoder_hidden_dim": 64,
         "face_encoder_num_heads": 4, "inject_face_latents_blocks": 1},
    ),
    "WanAnimate2Transformer3DModel": Tiny(
        _animate2, {"in_dim": 32, "out_dim": 16, "text_len": 8}
    ),
    "Kandinsky6Transformer3DModel": Tiny(
        lambda draw: {"hidden_states": draw(1, 2, 8, 8, 33), "encoder_hidden_states": draw(1, 8, WIDTH), "timestep": step(),
                      "pooled_projections": draw(1, WIDTH), "audio_hidden_states": draw(1, 6, 20)},
    ),
    "Kandinsky6SRTransformer3DModel": Tiny(
        lambda draw: {"hidden_states": draw(1, 2, 8, 8, 129), "timestep": step()}, {"out_visual_dim": 64}
    ),
    "AnyFlowFARTransformer3DModel": Tiny(
        lambda draw: frames_first(draw, timestep=torch.ones(1, 2), r_timestep=torch.zeros(1, 2), chunk_partition=[1, 1]),
        {"chunk_partition": (1, 1)},
    ),
    "WanVACETransformer3DModel": Tiny(
        lambda draw: video(draw, control_hidden_states=draw(1, 96, 2, 8, 8)), {"vace_layers": [0]}
    ),
}  # fmt: skip
