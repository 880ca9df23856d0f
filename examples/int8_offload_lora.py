"""INT8 LoRA fine-tuning with half of the decoder layers offloaded to the CPU by accelerate.

    python examples/int8_offload_lora.py [--steps 40] [--reentrant] [--device cuda]

A Llama is built from a config, saved, and loaded from disk in INT8; peft adds LoRA; accelerate keeps the INT8
weights of the second half of the layers in CPU memory and brings each to the device for its own forward;
gradient checkpointing is on. The text is Python's standard library, read byte by byte.

Without the plugin the first backward dies, whatever the model and the device (bitsandbytes 0.46.1 to 0.50.2).
The script shows that first, in a process of its own; then it trains with the plugin, and compares the
gradients with those of the same model when nothing is offloaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import bitsandbytes as bnb  # with bnb-patches installed, this import is all that a program needs
import torch
from accelerate import cpu_offload
from common import batches, gradients, largest_difference, print_changes, quiet, run_without_plugin, save_llama
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from tqdm import tqdm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def main() -> int:
    args = arguments()
    quiet()
    if args.attempt:
        train(offloaded(args.attempt, args), args, steps=1)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        save_llama(base, args.hidden, args.layers)
        without_plugin(base)
        return with_plugin(base, args)


def without_plugin(base: Path) -> None:
    """Show how the first training step ends without the plugin."""
    print("Without the plugin:", flush=True)
    done = run_without_plugin(base)
    if done.returncode == 0:
        print(f"  one step went through: bitsandbytes {bnb.__version__} does not need this repair\n")
        return
    lines = done.stderr.strip().splitlines()
    frames = [line.strip() for line in lines if line.strip().startswith("File ")]
    print(f"  training dies in the first step:\n    {frames[-1] if frames else ''}\n    {lines[-1]}\n")


def with_plugin(base: Path, args: argparse.Namespace) -> int:
    """Train with half of the layers offloaded; return 0 if the loss fell and the gradients are right."""
    import patches

    print("With the plugin:", flush=True)
    patches.apply()  # needed only where autoload is off; where it is on, this changes nothing
    model = offloaded(base, args)
    losses = train(model, args, args.steps)
    few = max(1, len(losses) // 10)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    print(f"  loss {first:.3f} -> {last:.3f} nats a byte in {len(losses)} steps")

    adapter = base.parent / "adapter"
    model.save_pretrained(adapter)
    reference = PeftModel.from_pretrained(quantized(base, args), adapter, is_trainable=True).train()
    batch = next(batches(args.batch, args.device))
    expected = gradients(reference, batch)
    difference = largest_difference(gradients(model, batch), expected)
    print(f"  gradients of {len(expected)} LoRA tensors, offloaded against not: largest difference {difference}")
    print_changes()
    return 0 if last < first and difference == 0 else 1


def quantized(folder: Path, args: argparse.Namespace) -> PreTrainedModel:
    """The model from disk in INT8, frozen, with gradient checkpointing on."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=BitsAndBytesConfig(load_in_8bit=True),
        dtype=torch.bfloat16,
        device_map={"": args.device},
    )
    return prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": args.reentrant})


def offloaded(folder: Path, args: argparse.Namespace) -> PeftModel:
    """The same model with LoRA, the INT8 weights of the second half of its layers in CPU memory.

    LoRA is added first and stays on the device, as accelerate cannot train what it offloads. The device is a
    ``torch.device``: given the string "cpu", accelerate looks for a GPU.
    """
    model = quantized(folder, args)
    torch.manual_seed(1)
    peft_model = get_peft_model(model, LORA)
    layers = model.model.layers
    for layer in layers[len(layers) // 2 :]:
        for module in list(layer.modules()):
            if isinstance(module, bnb.nn.Linear8bitLt):
                cpu_offload(module, execution_device=torch.device(args.device))
    return peft_model


def train(model: PeftModel, args: argparse.Namespace, steps: int) -> list[float]:
    """A plain training loop; returns the loss of each step."""
    model.train()  # without it peft leaves the base in eval mode, where nothing is checkpointed
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)
    samples = batches(args.batch, args.device)
    losses = []
    bar = tqdm(range(steps), desc="  training", unit="step")
    for _ in bar:
        batch = next(samples)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers, half of them offloaded")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model, a multiple of 32")
    parser.add_argument("--batch", type=int, default=4, help="samples in a batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--reentrant", action="store_true", help="the older kind of gradient checkpointing")
    parser.add_argument("--attempt", type=Path, help=argparse.SUPPRESS)  # one step on the model in this folder
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
