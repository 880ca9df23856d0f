"""Mixtures that are measured: saved, loaded, with LoRA, and a training step of them."""

from __future__ import annotations

import tempfile
from typing import Any

RANK = 8
TOP = 4
HEADS = dict(vocab_size=512, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
WIDE = dict(hidden_size=512, moe_intermediate_size=256, num_hidden_layers=2)


def mixture(count: int, implementation: str, dtype: Any = None, four: bool = False) -> Any:
    """A Qwen3-MoE from disk, on the processor."""
    with tempfile.TemporaryDirectory() as name:
        save_mixture(name, count, dtype)
        return load_mixture(name, implementation, dtype, four)


def save_mixture(folder: str, count: int, dtype: Any = None, device: str = "cpu", **sizes: int) -> None:
    """Save a Qwen3-MoE of ``count`` experts a layer, made on ``device``."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(**{**HEADS, **WIDE, **sizes}, num_experts=count, num_experts_per_tok=TOP)
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32).save_pretrained(folder)


def load_mixture(folder: str, implementation: str, dtype: Any = None, four: bool = False, device: str = "cpu") -> Any:
    """The mixture; ``four``: its linear layers in 4 bits, and experts as ``load_in_4bit`` leaves them."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = dtype or torch.float32
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    options = {"device_map": {"": device}, **({"quantization_config": nf4} if four else {})}
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation=implementation, **options)
    return made.requires_grad_(False)


def with_linears(model: Any) -> Any:
    """As transformers 4 had it: three layers an expert, and a loop over the experts that tokens chose."""
    for name, module in list(model.named_modules()):
        if name.endswith("mlp.experts"):
            model.set_submodule(name, _experts_of_linears(module))
    return model


def _experts_of_linears(module: Any) -> Any:
    import torch
    from bitsandbytes.nn import Linear4bit

    def layer(weight: Any) -> Any:
        options = {"bias": False, "quant_type": "nf4", "compress_statistics": False, "compute_dtype": weight.dtype}
        new = Linear4bit(weight.shape[1], weight.shape[0], **options)
        new.load_state_dict({"weight": weight})
        return new.to(weight.device)

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            gates = [weight.chunk(2) for weight in module.gate_up_proj.data]
            self.gate_proj = torch.nn.ModuleList(layer(gate) for gate, _ in gates)
            self.up_proj = torch.nn.ModuleList(layer(up) for _, up in gates)
            self.down_proj = torch.nn.ModuleList(layer(down) for down in module.down_proj.data)

        def forward(self, hidden: Any, chosen: Any, weights: Any) -> Any:
            out = torch.zeros_like(hidden)
            mask = torch.nn.functional.one_hot(chosen, len(self.gate_proj)).permute(2, 1, 0)
            for number in mask.sum((-1, -2)).nonzero()[:, 0].tolist():
                place, token = torch.where(mask[number])
                x = hidden[token]
                x = self.down_proj[number](module.act_fn(self.gate_proj[number](x)) * self.up_proj[number](x))
                out.index_add_(0, token, x * weights[token, place, None])
            return out

    return Experts()


def with_lora(model: Any, linears: bool, on_experts: bool = True) -> Any:
    import torch
    from bitsandbytes.nn import Linear4bit
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "v_proj"]
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if on_experts and not linears else None
    if linears:
        names += [
            name for name, module in model.named_modules() if isinstance(module, Linear4bit) and ".experts." in name
        ]
    torch.manual_seed(1)
    config = LoraConfig(r=RANK, target_modules=names, target_parameters=parameters, init_lora_weights=False)
    made = get_peft_model(model, config, autocast_adapter_dtype=False).train()
    made.enable_input_require_grads()
    return made


def step(model: Any, ids: Any) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def size_of(model: Any) -> int:
    """Of parameters and quantization states."""
    from bitsandbytes.nn import Params4bit

    every = list(model.parameters())
    return sum(p.nbytes + (p.quant_state.absmax.nbytes if isinstance(p, Params4bit) else 0) for p in every)
