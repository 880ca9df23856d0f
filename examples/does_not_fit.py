"""A quantized model that is larger than the memory given to it: load, train LoRA, save, load again, merge.

    python examples/does_not_fit.py [--steps 20] [--kind nf4|int8] [--device cuda]

``max_memory`` allows half of what the quantized model takes; ``device_map="auto"`` sends the other half to the disk.
Without bnb-patches, ``from_pretrained`` raises an error: some modules are dispatched on the CPU or the disk. It runs on
transformers 4.53 and later.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401 - with bnb-patches installed, this import applies the plugin
import torch
from common import DEVICE, batches, fast_dtype, in_dtype, quiet, save_llama
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from tqdm import tqdm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import patches

LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def main() -> int:
    args = arguments()
    quiet()
    patches.apply()  # needed only where autoload is off
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_llama(folder / "base", args.hidden, args.layers, fast_dtype())
        size = loaded(folder, args, device_map={"": args.device}).get_memory_footprint()
        half = {0 if args.device == "cuda" else args.device: size // 2}
        options = {"device_map": "auto", "max_memory": half, "offload_folder": folder / "offload"}
        model = loaded(folder, args, **options)
        away = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_meta)
        print(f"  the model takes {size / 1e6:.1f} MB, max_memory is half of it: {away / 1e6:.1f} MB lie on the disk")
        few, losses = 4, train(model, args, folder / "adapter")
        first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
        print(f"  loss {first:.3f} -> {last:.3f} nats a byte in {args.steps} steps (means of {few})")
        same = same_again(folder, args, options)
        return 0 if same and last < first else 1


def loaded(folder: Path, args: argparse.Namespace, **options: Any) -> Any:
    """The checkpoint, quantized while it is loaded."""
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": fast_dtype()}
    how = BitsAndBytesConfig(**nf4) if args.kind == "nf4" else BitsAndBytesConfig(load_in_8bit=True)
    options |= in_dtype(fast_dtype())
    return AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=how, **options)


def train(model: Any, args: argparse.Namespace, adapter: Path) -> list[float]:
    """A few steps of LoRA with gradient checkpointing, and the adapter saved; returns the loss of each."""
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(model, LORA).train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)
    samples, losses = batches(args.batch, args.device), []
    for _ in tqdm(range(args.steps), desc="  training", unit="step"):
        batch = next(samples)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(adapter)
    return losses


def same_again(folder: Path, args: argparse.Namespace, options: dict[str, Any]) -> bool:
    """Whether the adapter on the offloaded model, also merged, gives what it gives on the same model without a disk."""
    offloaded = PeftModel.from_pretrained(loaded(folder, args, **options), folder / "adapter").eval()
    batch = next(batches(args.batch, args.device))
    with torch.no_grad():
        adapted = offloaded(input_ids=batch).logits
        merged = offloaded.merge_and_unload()(input_ids=batch).logits
    off = float((merged - adapted).norm() / adapted.norm())
    with torch.no_grad():
        whole = PeftModel.from_pretrained(loaded(folder, args, device_map={"": args.device}), folder / "adapter").eval()
        differ = float((whole(input_ids=batch).logits - adapted).abs().max())
        merged_whole = whole.merge_and_unload()(input_ids=batch).logits
    differ_merged = float((merged_whole - merged).abs().max())
    print(f"  loaded again, outputs against those of a model loaded whole: largest difference {differ}")
    print(f"  merged, the same: {differ_merged}; merging rounds to {args.kind}, which moves the outputs by {off:.1%}")
    # Not 0 on every processor: with AVX512-BF16, bitsandbytes may multiply a layer in memory by another kernel.
    return max(differ, differ_merged) < 0.01 * float(adapted.abs().max())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    parser.add_argument("--kind", choices=("nf4", "int8"), default="nf4", help="how the model is quantized")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model, a multiple of 32")
    parser.add_argument("--batch", type=int, default=2, help="samples in a batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--device", default=DEVICE.partition(":")[0])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
