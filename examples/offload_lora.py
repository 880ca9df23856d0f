"""LoRA fine-tuning of a model that does not fit: half of its layers stay on disk.

    python examples/offload_lora.py [--kind bf16 int8 nf4] [--steps 20] [--reentrant] [--device cuda]

A Llama lies on disk, as a checkpoint from the Hub would. ``from_pretrained`` gets a device map that sends the
second half of its layers to the disk, the head to CPU memory where there is an accelerator; peft adds LoRA, a loop
trains it with gradient checkpointing, the adapter is saved, loaded into a model offloaded likewise, and merged.
``from_pretrained`` leaves what is offloaded unquantized, so that INT8 and 4-bit models are loaded whole and then
sent to the disk with ``accelerate.dispatch_model``; the rest is the same.

Without the plugin the first backward dies. The script shows that first, in a process of its own; then it does all of
the above with the plugin, and compares each result with that of the same model when nothing is offloaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import bitsandbytes as bnb  # with bnb-patches installed, this import is all that a program needs
import torch
from accelerate import dispatch_model
from common import batches, gradients, largest_difference, print_changes, quiet, run_without_plugin, save_llama
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from tqdm import tqdm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
KINDS = {
    "bf16": {},
    "int8": {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
    "nf4": {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")},
}


def main() -> int:
    args = arguments()
    quiet()
    if args.attempt:
        train(get_peft_model(offloaded(args.attempt, args.kind[0], args), LORA), args, steps=1)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        save_llama(base, args.hidden, args.layers)
        print("Without the plugin:", flush=True)
        for kind in args.kind:
            without_plugin(base, kind)
        print("\nWith the plugin:", flush=True)
        import patches

        patches.apply()  # needed only where autoload is off; where it is on, this changes nothing
        right = [with_plugin(base, kind, args) for kind in args.kind]
    print_changes()
    return 0 if all(right) else 1


def without_plugin(base: Path, kind: str) -> None:
    """Show how the first training step ends without the plugin."""
    done = run_without_plugin(base, "--kind", kind)
    if done.returncode == 0:
        print(f"  {kind}: one step went through: bitsandbytes {bnb.__version__} and its stack need no repair here")
        return
    lines = done.stderr.strip().splitlines()
    frames = [line.strip() for line in lines if line.strip().startswith("File ")]
    frame = frames[-1] if frames else ""
    print(f"  {kind}: training dies in the first step:\n    {frame}\n    {lines[-1]}", flush=True)


def with_plugin(base: Path, kind: str, args: argparse.Namespace) -> bool:
    """Train offloaded, save, load, merge; whether the loss fell and all is that of the whole model."""
    model = offloaded(base, kind, args)
    away, total = megabytes(model, offloaded_only=True), megabytes(model)
    print(f"  {kind}: {away:.1f} of {total:.1f} MB are on the device only while they are used", flush=True)
    torch.manual_seed(1)
    model = get_peft_model(model, LORA)
    losses = train(model, args, args.steps)
    few = max(1, len(losses) // 10)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    print(f"    loss {first:.3f} -> {last:.3f} nats a byte in {len(losses)} steps")

    adapter = base.parent / f"adapter-{kind}"
    model.save_pretrained(adapter)
    batch = next(batches(args.batch, args.device))
    reference = PeftModel.from_pretrained(whole(base, kind, args), adapter, is_trainable=True).train()
    expected = gradients(reference, batch)
    differences = {f"gradients of {len(expected)} LoRA tensors": largest_difference(gradients(model, batch), expected)}
    again = PeftModel.from_pretrained(offloaded(base, kind, args), adapter)
    differences["outputs with the adapter loaded again"] = difference(again, reference, batch)
    merged, expected_merged = model.merge_and_unload(), reference.merge_and_unload()
    differences["outputs with the adapter merged"] = difference(merged, expected_merged, batch)
    for what, figure in differences.items():
        print(f"    {what}, offloaded against not: largest difference {figure}", flush=True)
    still = megabytes(merged, offloaded_only=True) == away
    return last < first and not any(differences.values()) and still


def whole(folder: Path, kind: str, args: argparse.Namespace) -> PreTrainedModel:
    """The model from disk, frozen, with gradient checkpointing on, all of it on the device."""
    options = {"dtype": torch.bfloat16, "device_map": {"": args.device}, **KINDS[kind]}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    return prepared(model, kind, args)


def offloaded(folder: Path, kind: str, args: argparse.Namespace) -> PreTrainedModel:
    """The same with the second half of its layers on disk."""
    away = str(folder.parent / "offloaded")
    if kind == "bf16":
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map=device_map(args), offload_folder=away
        )
    else:
        options = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}, **KINDS[kind]}
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        away = tempfile.mkdtemp(dir=folder.parent)
        model = dispatch_model(model, device_map(args), main_device=args.device, offload_dir=away, force_hooks=True)
    return prepared(model, kind, args)


def device_map(args: argparse.Namespace) -> dict[str, str]:
    resident = ("model.embed_tokens", "model.norm", "model.rotary_emb")
    layers = {f"model.layers.{i}": args.device if i < args.layers // 2 else "disk" for i in range(args.layers)}
    return {**dict.fromkeys(resident, args.device), **layers, "lm_head": "cpu"}


def prepared(model: PreTrainedModel, kind: str, args: argparse.Namespace) -> PreTrainedModel:
    """``model`` ready for an adapter, with gradient checkpointing on."""
    options = {"use_reentrant": args.reentrant}
    if kind != "bf16":
        return prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=options)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.enable_input_require_grads()
    return model


def train(model: PeftModel, args: argparse.Namespace, steps: int) -> list[float]:
    """A plain training loop; returns the loss of each step."""
    model.train()  # without it peft leaves the base in eval mode, where nothing is checkpointed
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)
    samples = batches(args.batch, args.device)
    losses = []
    bar = tqdm(range(steps), desc="    training", unit="step")
    for _ in bar:
        batch = next(samples)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


def difference(ours: torch.nn.Module, theirs: torch.nn.Module, batch: torch.Tensor) -> float:
    """The largest absolute difference between the outputs of two models."""
    with torch.no_grad():
        return float((ours.eval()(batch).logits - theirs.eval()(batch).logits).abs().max())


def megabytes(model: torch.nn.Module, offloaded_only: bool = False) -> float:
    """What the parameters of ``model`` take, or those that are not on a device now."""
    return sum(p.nbytes for p in model.parameters() if p.is_meta or not offloaded_only) / 1e6


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=["bf16", "int8"], help="of weights (bf16 int8)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers, half of them offloaded")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model, a multiple of 32")
    parser.add_argument("--batch", type=int, default=4, help="samples in a batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--reentrant", action="store_true", help="the older kind of gradient checkpointing")
    parser.add_argument("--attempt", type=Path, help=argparse.SUPPRESS)  # one step on the model in this folder
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
