"""4-bit QLoRA with every decoder layer compiled whole: ``torch.compile(fullgraph=True)`` over a checkpoint.

    python examples/qlora_compile.py [--steps 10] [--backend inductor] [--device cuda]

The case is the default one: a bfloat16 checkpoint, quantized from bfloat16, and
``bnb_4bit_compute_dtype`` left at float32, so that activations come in another dtype than the weights were
quantized from. Gradient checkpointing is inside the compiled region, and the first call is the compiled one.

On bitsandbytes 0.49.0 to 0.49.2 the forward writes the dtype of the activations into the quantization state;
inside a checkpoint Dynamo refuses that, and compilation dies. A model that ran once in eager mode hides it.
From 0.50.0 on it is fixed upstream, and the script says so. Whole-model compilation meets other obstacles:
see the patch table of the README.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import bitsandbytes as bnb  # with bnb-patches installed, this import is all that a program needs
import torch
from common import batches, gradients, largest_difference, print_changes, quiet, run_without_plugin, save_llama
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from tqdm import tqdm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


def main() -> int:
    args = arguments()
    quiet()
    if args.attempt:
        gradients(compiled(args.attempt, args), next(batches(args.batch, args.device)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        save_llama(Path(folder), args.hidden, args.layers)
        without_plugin(Path(folder))
        return with_plugin(Path(folder), args)


def without_plugin(base: Path) -> None:
    """Show how the first compiled step ends without the plugin."""
    print("Without the plugin:", flush=True)
    done = run_without_plugin(base)
    if done.returncode == 0:
        print(f"  compiled, one step went through: bitsandbytes {bnb.__version__} has this repaired\n")
        return
    said = [line.strip() for line in done.stderr.splitlines() if line.startswith("torch._dynamo.exc")]
    said += [line.strip() for line in done.stderr.splitlines() if "Explanation:" in line or "context:" in line]
    print("  compilation dies:", *(said or done.stderr.strip().splitlines()[-1:]), sep="\n    ", end="\n\n")


def with_plugin(base: Path, args: argparse.Namespace) -> int:
    """Compile cold, compare with eager, train; return 0 if both agree and the loss fell."""
    import patches

    print("With the plugin:", flush=True)
    patches.apply()  # needed only where autoload is off; where it is on, this changes nothing
    model = compiled(base, args)
    batch = next(batches(args.batch, args.device))
    cold = gradients(model, batch)
    layer = next(m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit))
    print(f"  weights quantized from {layer.weight.quant_state.dtype}, computed in {layer.compute_dtype}")

    eager = gradients(loaded(base, args), batch)
    difference = largest_difference(cold, eager) / max(float(g.abs().max()) for g in eager.values())
    print(f"  gradients of {len(eager)} LoRA tensors, compiled against eager: largest relative difference {difference}")

    losses = train(model, args)
    print(f"  loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a byte in {len(losses)} steps")
    print_changes()
    return 0 if losses[-1] < losses[0] and difference < 1e-4 else 1


def loaded(folder: Path, args: argparse.Namespace) -> PeftModel:
    """The model from disk in 4 bits with LoRA, gradient checkpointing on, in training mode."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        dtype=torch.bfloat16,
        device_map={"": args.device},
    )
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    return get_peft_model(model, LORA).train()


def compiled(folder: Path, args: argparse.Namespace) -> PeftModel:
    """The same, each decoder layer compiled; transformers puts the checkpoint inside the compiled call."""
    model = loaded(folder, args)
    for layer in model.get_base_model().model.layers:
        layer.compile(fullgraph=True, backend=args.backend)
    return model


def train(model: PeftModel, args: argparse.Namespace) -> list[float]:
    """A few steps on one batch; returns the loss of each."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)
    batch = next(batches(args.batch, args.device))
    losses = []
    for _ in tqdm(range(args.steps), desc="  training", unit="step"):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="training steps (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model, a multiple of 64")
    parser.add_argument("--batch", type=int, default=2, help="samples in a batch")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="aot_eager", help='of torch.compile; "inductor" needs a C++ compiler')
    parser.add_argument("--attempt", type=Path, help=argparse.SUPPRESS)  # one step on the model in this folder
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
