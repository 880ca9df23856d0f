"""Tiny mixtures, and the model that experts in 4 bits are compared with: the same in floating point, rounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as t
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from patches.experts import int8_matrix
from patches.experts.experts_in_model import find_experts, matrices_per_expert, weight_converters
from patches.repairs.reproducers import mixtures

BASE = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
HEADS = dict(BASE, head_dim=16)
CHOSEN = dict(num_experts_per_tok=2)
WIDTH = dict(moe_intermediate_size=64)
SHARED = dict(shared_expert_intermediate_size=64)
GROUPS = dict(n_routed_experts=4, n_group=1, topk_group=1, **CHOSEN, **WIDTH)
LATENT = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16)
FULL = dict(layer_types=["full_attention"] * 2)

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: t.Qwen3MoeConfig(**HEADS, **CHOSEN, **WIDTH, num_experts=4),
    "mixtral": lambda: t.MixtralConfig(**HEADS, **CHOSEN, num_local_experts=4),
    "gpt_oss": lambda: t.GptOssConfig(**HEADS, **CHOSEN, num_local_experts=4),
    "llama4": lambda: t.Llama4TextConfig(
        **HEADS, intermediate_size_mlp=128, num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=1
    ),
    "qwen2_moe": lambda: t.Qwen2MoeConfig(**BASE, **CHOSEN, **WIDTH, **SHARED, num_experts=4),
    "olmoe": lambda: t.OlmoeConfig(**BASE, **CHOSEN, num_experts=4),
    "gemma4": lambda: t.Gemma4TextConfig(
        **HEADS, **WIDTH, num_experts=4, top_k_experts=2, enable_moe_block=True, hidden_size_per_layer_input=0,
        num_kv_shared_layers=0, global_head_dim=16,
    ),
    "deepseek_v3": lambda: t.DeepseekV3Config(
        **{**BASE, "num_key_value_heads": 4}, **LATENT, **GROUPS, first_k_dense_replace=0
    ),
    "glm4_moe": lambda: t.Glm4MoeConfig(**HEADS, **GROUPS, first_k_dense_replace=0),
    "qwen3_5_moe": lambda: t.Qwen3_5MoeTextConfig(**HEADS, **CHOSEN, **WIDTH, **SHARED, **FULL, num_experts=4),
    "granitemoe": lambda: t.GraniteMoeConfig(**BASE, **CHOSEN, num_local_experts=4),
    "minimax_m2": lambda: t.MiniMaxM2Config(**HEADS, **CHOSEN, num_local_experts=4),
    "ernie4_5_moe": lambda: t.Ernie4_5_MoeConfig(
        **BASE, **WIDTH, moe_num_experts=4, moe_k=2, moe_layer_start_index=0
    ),
    "jetmoe": lambda: t.JetMoeConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_key_value_heads=2, kv_channels=16,
        vocab_size=256, num_local_experts=4, **CHOSEN,
    ),
}  # fmt: skip
SOME = ("qwen3_moe", "mixtral", "gpt_oss", "llama4")
IDS = torch.arange(48)[None] % 256


def saved(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """A model of ``kind`` in floating point, whose experts differ from each other."""
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    for parameter in model.parameters():
        if parameter.dim() == 3:
            torch.nn.init.normal_(parameter, std=0.02)
    model.to(dtype).save_pretrained(folder)
    return folder


def loaded(
    folder: Path, implementation: str | None = "eager", dtype: torch.dtype = torch.float32, **config: Any
) -> Any:
    given = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, **config}
    extra = {"experts_implementation": implementation} if implementation else {}
    return t.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": "cpu"}, quantization_config=t.BitsAndBytesConfig(**given), **extra
    )


def rounded(model: Any, quant_type: str = "nf4", double: bool = False) -> Any:
    """``model`` with each matrix of its experts rounded to what 4 bits make of it, in floating point."""
    known = weight_converters(model)
    for one in find_experts(model):
        count = matrices_per_expert(one.full_name, known)
        for number, expert in enumerate(one.parameter.data.clone()):
            quantized = [
                dequantize_4bit(*quantize_4bit(matrix.contiguous(), quant_type=quant_type, compress_statistics=double))
                for matrix in expert.chunk(count)
            ]
            one.parameter.data[number] = torch.cat(quantized)
    return model


def step(model: Any, autocast: bool = False, checkpointing: bool = False) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of the embedding and of the routers."""
    model.train().requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable()
    trained = {"embedding": model.get_input_embeddings().weight}
    for name, parameter in model.named_parameters():
        if ("gate.weight" in name or "router" in name) and type(parameter) is torch.nn.Parameter:
            trained[name] = parameter
    for parameter in trained.values():
        parameter.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in trained.items()}
    assert all(gradient is not None for gradient in gradients.values())
    return {"logits": out.logits.detach(), **gradients}


def gap(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    """The largest relative difference; 0 if they are equal to the bit."""
    assert set(expected) == set(got)
    return max(float((expected[k] - got[k]).norm() / expected[k].norm()) for k in expected)


def pack_int8(folder):
    """``mixtures.pack_checkpoint`` in INT8, as transformers 4 wrote it."""

    def packed(name, weight):
        codes, scales = int8_matrix.quantize_rows(weight)
        layer, form = name.removesuffix("weight"), torch.tensor(0, dtype=torch.uint8)
        values = int8_matrix.dequantize_rows(codes, scales, weight.dtype)
        return {name: codes, f"{layer}SCB": scales, f"{layer}weight_format": form}, values

    return mixtures.repack_checkpoint(folder, packed, {"quant_method": "bitsandbytes", "load_in_8bit": True})
