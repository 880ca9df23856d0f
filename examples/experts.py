"""A mixture of experts in 4 bits: load, train LoRA on attention and experts, save, load again, generate.

    python examples/experts.py [--steps 20] [--hidden 128] [--experts 8] [--device cuda]

transformers 5 keeps the experts of a layer in parameters of three dimensions, which ``load_in_4bit`` leaves in
floating point: of a Qwen3-30B-A3B 58 GB. ``patches.quantize_experts`` quantizes them; LoRA trains on them through
peft's own ``target_parameters``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import bitsandbytes  # noqa: F401 - with bnb-patches installed, this import applies the plugin
import torch
from common import LENGTH, batches, fast_dtype, quiet
from peft import LoraConfig, PeftModel, get_peft_model
from tqdm import tqdm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, ByT5Tokenizer, PreTrainedModel, Qwen3MoeConfig

import patches

LORA = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    task_type="CAUSAL_LM",
)


def main() -> int:
    args = arguments()
    quiet()
    patches.apply()  # needed only where autoload is off
    with tempfile.TemporaryDirectory() as name:
        base, adapter = Path(name, "base"), Path(name, "adapter")
        save_mixture(base, args)
        model = loaded(base, args)
        losses = train(get_peft_model(model, LORA).train(), args, adapter)
        trained = losses[-1] < losses[0]
        print(f"  loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a byte in {len(losses)} steps")
        return 0 if same_again(base, adapter, model, args) and trained else 1


def save_mixture(folder: Path, args: argparse.Namespace) -> None:
    """A Qwen3-MoE with fresh weights, as a checkpoint from the Hub lies on disk."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=ByT5Tokenizer(extra_ids=0).vocab_size,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        moe_intermediate_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        head_dim=32,
        num_experts=args.experts,
        num_experts_per_tok=2,
        max_position_embeddings=2 * LENGTH,
        initializer_range=0.06,
    )
    AutoModelForCausalLM.from_config(config, dtype=fast_dtype()).save_pretrained(folder)


def loaded(folder: Path, args: argparse.Namespace, say: bool = True) -> PreTrainedModel:
    """The model from disk, attention and experts in 4 bits."""
    dtype = fast_dtype()
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=nf4, dtype=dtype, device_map={"": args.device}
    )
    before = size(model)
    patches.quantize_experts(model)
    if say:
        print(
            f"  parameters: {before / 1e6:.2f} MB with load_in_4bit, {size(model) / 1e6:.2f} MB with experts in 4 bits"
        )
    return model


def size(model: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def train(model: PeftModel, args: argparse.Namespace, folder: Path) -> list[float]:
    """A few steps on one batch, and the adapter saved to ``folder``; returns the loss of each."""
    on_experts = [n for n, p in model.named_parameters() if p.requires_grad and ".experts." in n]
    print(f"  LoRA trains {len(on_experts)} tensors of experts, and attention")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)
    batch = next(batches(args.batch, args.device))
    losses = []
    for _ in tqdm(range(args.steps), desc="  training", unit="step"):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.save_pretrained(folder)
    return losses


def same_again(base: Path, adapter: Path, trained: PreTrainedModel, args: argparse.Namespace) -> bool:
    """Load base and adapter again; whether both models generate the same."""
    again = PeftModel.from_pretrained(loaded(base, args, say=False), adapter)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    prompt = tokenizer("import ", add_special_tokens=False, return_tensors="pt").to(args.device)
    texts = []
    for model in (trained, again):
        generated = model.eval().generate(**prompt, max_new_tokens=24, do_sample=False)
        texts.append(tokenizer.decode(generated[0]))
    same = texts[0] == texts[1]
    print(f"  loaded again, it generates {'the same' if same else 'something else'}: {texts[1]!r}")
    return same


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model, a multiple of 64")
    parser.add_argument("--experts", type=int, default=8, help="in a layer")
    parser.add_argument("--batch", type=int, default=2, help="samples in a batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
