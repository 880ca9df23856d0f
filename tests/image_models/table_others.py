"""Models of sound, of proteins and of embeddings, and those that take several of these at once."""

from __future__ import annotations

import torch

from .tiny import WIDTH, Draw, Inputs, Tiny, grid, mask, step


def _cosmos3(draw: Draw) -> Inputs:
    shapes = [(2, 4, 4)]
    return {
        "input_ids": draw.below(64, 8),
        "text_indexes": torch.arange(8),
        "position_ids": torch.cat([torch.arange(8).repeat(3, 1), 8 + grid(2, 4, 4).long().T], 1),
        "und_len": 8,
        "sequence_length": 40,
        "vision_tokens": [draw(1, 16, 2, 8, 8)],
        "vision_token_shapes": shapes,
        "vision_sequence_indexes": torch.arange(8, 40),
        "vision_mse_loss_indexes": torch.arange(8, 40),
        "vision_timesteps": torch.full((32,), 500.0),
        "vision_noisy_frame_indexes": [torch.arange(2)],
    }


def _minimax_h3(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(1, 16, 96),
        "audio_hidden_states": draw(1, 4, 32),
        "encoder_hidden_states": draw(1, 8, WIDTH),
        "timestep": step(0.5),
        "timestep_indices": torch.zeros(28, dtype=torch.long),
        "token_tags": torch.tensor([0] * 16 + [1] * 4 + [2] * 8),
        "position_ids": torch.cat([grid(1, 4, 4), torch.arange(12)[:, None].repeat(1, 3)]),
        "video_indices": torch.arange(16),
        "audio_indices": torch.arange(16, 20),
        "text_indices": torch.arange(20, 28),
    }


def _motionless(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(1, 32, 16),
        "encoder_hidden_states": draw(1, 8, WIDTH),
        "encoder_attention_mask": mask(1, 8),
        "timestep": step(0.5),
        "attention_mask": mask(1, 32),
    }


def _sana_wm(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(1, 16, 2, 8, 8),
        "timestep": torch.ones(1, 1, 2),
        "encoder_hidden_states": draw(1, 1, 8, WIDTH),
        "mask": torch.ones(1, 1, 1, 8),
    }


def _protein(draw: Draw) -> Inputs:
    return {
        "bb_ca": draw(1, 8, 3),
        "local_latents": draw(1, 8, 8),
        "bb_ca_time": step(0.5),
        "local_latents_time": step(0.5),
        "padding_mask": mask(1, 8),
        "conditioning": {"is_in_context_conditioning": torch.zeros(1, 8), "supports_local_latent": torch.ones(1, 8)},
    }


TABLE: dict[str, Tiny | str] = {
    "AceStepTransformer1DModel": Tiny(
        lambda draw: {"hidden_states": draw(1, 16, 8), "timestep": step(0.5), "timestep_r": step(0.5),
                      "encoder_hidden_states": draw(1, 8, WIDTH), "context_latents": draw(1, 16, 16)},
        {"num_hidden_layers": 2, "in_channels": 24, "audio_acoustic_hidden_dim": 8, "sliding_window": 4},
    ),
    "Cosmos3OmniTransformer": Tiny(
        _cosmos3,
        {"latent_channel": 16, "patch_latent_dim": 64, "rope_scaling": {"mrope_section": [4, 2, 2]}, "base_fps": 24},
    ),
    "LongCatAudioDiTTransformer": Tiny(_motionless, {"dit_text_dim": WIDTH, "latent_dim": 16}),
    "MiniMaxH3Transformer3DModel": Tiny(_minimax_h3, {"rope_freq_dim": 2}),
    "MiniMaxMusic3RVQDepthDecoder": Tiny(lambda draw: {"inputs_embeds": draw(1, 8, WIDTH)}, {"audio_vocab_size": 16}),
    "MiniMaxMusic3Transformer1DModel": Tiny(
        lambda draw: {"hidden_states": draw(1, 16, 16), "timestep": step(0.5), "encoder_hidden_states": draw(1, 16, 32)},
        {"in_channels": 16, "condition_dim": 32, "rotary_dim": 8, "fourier_embedding_dim": WIDTH},
    ),
    "PriorTransformer": Tiny(
        lambda draw: {"hidden_states": draw(1, WIDTH), "timestep": step(), "proj_embedding": draw(1, WIDTH),
                      "encoder_hidden_states": draw(1, 8, WIDTH), "attention_mask": mask(1, 8)},
        {"num_embeddings": 8},
    ),
    "RFD4ProteinaTransformer": Tiny(
        _protein,
        {"latent_dim": 8, "dim_cond": 64, "pair_repr_dim": 64, "tri_mult_c": 64, "feats_seq": ("xt_bb_ca", "xt_local_latents"),
         "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents"), "feats_pair_repr": ("xt_bb_ca_pair_dists",)},
    ),
    "SanaWMTransformer3DModel": Tiny(
        _sana_wm, {"in_channels": 16, "linear_head_dim": 16, "chunk_plucker_post_attn_blocks": 0, "image_size": 64}
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Tiny(
        lambda draw: {"hidden_states": draw(1, 32, WIDTH), "encoder_hidden_states": draw(1, 8, WIDTH), "timestep": torch.ones(1, 32),
                      "video_rotary_emb": (draw(1, 32, WIDTH), draw(1, 32, WIDTH)), "encoder_attention_mask": mask(1, 8)},
        {"in_channels": WIDTH, "out_channels": WIDTH, "audio_in_channels": WIDTH, "audio_out_channels": WIDTH,
         "caption_channels": WIDTH},
    ),
    "StableAudio3DiTModel": Tiny(
        lambda draw: {"hidden_states": draw(1, 16, 16), "timestep": step(0.5), "encoder_hidden_states": draw(1, 8, WIDTH),
                      "global_hidden_states": draw(1, WIDTH)},
        {"io_channels": 16, "cond_token_dim": WIDTH, "global_cond_dim": WIDTH, "local_add_cond_dim": 17,
         "timestep_features_dim": 64, "num_memory_tokens": 4},
    ),
    "StableAudioDiTModel": Tiny(
        lambda draw: {"hidden_states": draw(1, 16, 16), "timestep": step(0.5), "encoder_hidden_states": draw(1, 8, WIDTH),
                      "global_hidden_states": draw(1, 1, WIDTH), "rotary_embedding": (draw(17, 8), draw(17, 8))},
        {"sample_size": 16, "in_channels": 16, "out_channels": 16, "time_proj_dim": WIDTH, "global_states_input_dim": WIDTH,
         "cross_attention_input_dim": WIDTH},
    ),
    "T5FilmDecoder": Tiny(
        lambda draw: {"encodings_and_masks": [(draw(1, 8, WIDTH), torch.ones(1, 8))], "decoder_input_tokens": draw(1, 8, 16),
                      "decoder_noise_time": step(0.5)},
        {"input_dims": 16, "targets_length": 8},
    ),
    "TransformerTemporalModel": Tiny(
        lambda draw: {"hidden_states": draw(2, WIDTH, 4, 4), "timestep": step(), "num_frames": 2}, {"in_channels": WIDTH}
    ),
}  # fmt: skip
