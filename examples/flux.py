"""A quantized image model that is larger than the memory given to it: load, train LoRA, save, load again, fuse.

    python examples/flux.py [--steps 20] [--kind nf4|int8] [--device cuda]

A small FLUX with random weights learns to turn noise into one of a few patterns. The map leaves its blocks on the disk.
Without bnb-patches, ``from_pretrained`` raises an error: some modules are dispatched on the CPU or the disk. It runs on
diffusers 0.35 and later.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401 - with bnb-patches installed, this import applies the plugin
import diffusers
import torch
from diffusers import BitsAndBytesConfig, FluxTransformer2DModel
from peft import LoraConfig
from tqdm import tqdm

import patches

LORA = LoraConfig(r=16, lora_alpha=32, target_modules=["to_q", "to_k", "to_v", "proj_mlp", "proj_out", "net.2"])
SIDE, CHANNELS, TEXT = 8, 16, 4
"""A picture is SIDE x SIDE latents of CHANNELS values; a prompt is TEXT vectors."""


def main() -> int:
    args = arguments()
    quiet()
    patches.apply()  # needed only where autoload is off
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_flux(folder / "base", args)
        blocks = dict.fromkeys(("transformer_blocks", "single_transformer_blocks"), "disk")
        model = loaded(folder, args, device_map={"": args.device, **blocks})
        away = sum(each.nbytes for each in model.parameters() if each.is_meta)
        print(f"  the model takes {model.get_memory_footprint() / 1e6:.2f} MB: {away / 1e6:.2f} MB lie on the disk")
        few, losses = 4, train(model, args, folder / "adapter")
        first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
        print(f"  loss {first:.3f} -> {last:.3f} in {args.steps} steps (means of {few})")
        same = same_again(folder, args, {"": args.device, **blocks})
        return 0 if same and last < first else 1


def save_flux(folder: Path, args: argparse.Namespace) -> None:
    """Save a FLUX with fresh weights, as the folder ``transformer`` of a pipeline lies on disk."""
    torch.manual_seed(0)
    sizes = {"attention_head_dim": 32, "num_attention_heads": args.hidden // 32, "axes_dims_rope": (8, 12, 12)}
    inputs = {"patch_size": 1, "in_channels": CHANNELS, "joint_attention_dim": 64, "pooled_projection_dim": 64}
    blocks = {"num_layers": args.layers, "num_single_layers": args.layers}
    FluxTransformer2DModel(**sizes, **inputs, **blocks).to(torch.bfloat16).save_pretrained(folder)


def loaded(folder: Path, args: argparse.Namespace, device_map: dict[str, Any]) -> Any:
    """The checkpoint, quantized while it is loaded."""
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": args.dtype}
    how = BitsAndBytesConfig(**nf4) if args.kind == "nf4" else BitsAndBytesConfig(load_in_8bit=True)
    options = {"quantization_config": how, "torch_dtype": args.dtype, "offload_folder": folder / "offload"}
    return FluxTransformer2DModel.from_pretrained(folder / "base", device_map=device_map, **options)


def train(model: Any, args: argparse.Namespace, adapter: Path) -> list[float]:
    """A few steps of LoRA with gradient checkpointing, and the adapter saved; returns the loss of each."""
    model.add_adapter(LORA)
    model.enable_gradient_checkpointing()
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)
    samples, losses = batches(args), []
    for _ in tqdm(range(args.steps), desc="  training", unit="step"):
        inputs, target = next(samples)
        loss = torch.nn.functional.mse_loss(model(**inputs).sample.float(), target.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_lora_adapter(adapter)
    return losses


def same_again(folder: Path, args: argparse.Namespace, device_map: dict[str, Any]) -> bool:
    """Whether the adapter on the offloaded model, also fused, gives what it gives on the same model without a disk."""
    inputs, _ = next(batches(args))
    adapted, fused = [], []
    for where in (device_map, {"": args.device}):
        model = loaded(folder, args, device_map=where).eval()
        model.load_lora_adapter(folder / "adapter", weight_name="pytorch_lora_weights.safetensors", prefix=None)
        with torch.no_grad():
            adapted.append(model(**inputs).sample.float())
            model.fuse_lora()
            model.unload_lora()
            fused.append(model(**inputs).sample.float())
    differ, differ_fused = (float((one - other).abs().max()) for one, other in (adapted, fused))
    off = float((fused[0] - adapted[0]).norm() / adapted[0].norm())
    print(f"  loaded again, outputs against those of a model loaded whole: largest difference {differ}")
    print(f"  fused, the same: {differ_fused}; fusing rounds to {args.kind}, which moves the outputs by {off:.1%}")
    return max(differ, differ_fused) < 0.01 * float(adapted[0].abs().max())


def batches(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Inputs of FLUX and what it is to predict, as in training by flow matching: the way from a picture to its noise."""
    order = torch.Generator().manual_seed(2)
    kinds, pooled = torch.randn(4, SIDE * SIDE, CHANNELS, generator=order), torch.randn(4, 64, generator=order)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)
    while True:
        which = torch.randint(4, (args.batch,), generator=order)
        noise, time = torch.randn(kinds[which].shape, generator=order), torch.rand(args.batch, generator=order)
        there = time[:, None, None]
        inputs = {
            "hidden_states": (1 - there) * kinds[which] + there * noise,
            "encoder_hidden_states": torch.zeros(args.batch, TEXT, 64),
            "pooled_projections": pooled[which],
            "timestep": time,
            "img_ids": places,
            "txt_ids": torch.zeros(TEXT, 3),
        }
        yield (
            {name: each.to(args.device, args.dtype) for name, each in inputs.items()},
            (noise - kinds[which]).to(args.device),
        )


def quiet() -> None:
    """Leave the screen to the figures: no loading bars, no notes on layers that lie elsewhere or on rounding."""
    for name in ("bitsandbytes", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="Merge lora module")
    diffusers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    parser.add_argument("--kind", choices=("nf4", "int8"), default="nf4", help="how the model is quantized")
    parser.add_argument("--layers", type=int, default=2, help="blocks of each of the two kinds")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model, a multiple of 32")
    parser.add_argument("--batch", type=int, default=4, help="pictures in a batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.dtype = torch.bfloat16 if args.device != "cpu" else torch.float32
    return args


if __name__ == "__main__":
    sys.exit(main())
