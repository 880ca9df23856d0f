"""``python -m tests.stacks.flows``: the main flows on the stack that is installed, unpatched and patched, as JSON.

Each flow is a program of a user on a tiny Llama that lies on disk. It returns how far it is from its reference (0 is
right), or into how many graphs torch.compile cut it (1 is right). Each runs in a fork of a process that has imported
the stack and changed nothing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import processor
from tests.stacks import models
from tests.stacks.models import IDS

KINDS = ("4-bit", "INT8")
Flow = Callable[[str], float]


def main() -> None:
    processor.pretend("plain")  # where an eval forward packs 4-bit weights, it computes in bfloat16
    import accelerate  # noqa: F401
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        models.save_base(folder)
        found = {
            name: {patched: _forked(flow, folder, patched == "patched") for patched in ("unpatched", "patched")}
            for name, flow in FLOWS.items()
        }
    print(json.dumps(found))


def _forked(flow: Flow, folder: str, patched: bool) -> str:
    """What ``flow`` gives in a fork of this process: a figure, or the error that it ends with."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        try:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            if patched:
                import patches

                patches.apply()
            said = f"{flow(folder):.3g}"
        except BaseException as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
        os.write(send, said.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said or "the process ended without an answer"


# -- flows -------------------------------------------------------------------------------------


def load(kind: str) -> Flow:
    """The outputs of the model, against the same model with its weights rounded in floating point."""

    def run(folder: str) -> float:
        quantized = models.load(folder, kind)
        plain = models.load(folder, None)
        for (_, dense), (_, layer) in zip(_linears(plain), _linears(quantized)):
            dense.weight.data = _rounded(layer)
        error = models.distance([models.logits(quantized)], [models.logits(plain)])
        return 0.0 if error < (1e-5 if kind == "4-bit" else 0.02) else error  # INT8 rounds activations, too

    return run


def _linears(model: Any) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in model.named_modules() if hasattr(m, "in_features") and "lm_head" not in n]


def _rounded(layer: Any) -> Any:
    import bitsandbytes as bnb

    if isinstance(layer, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    scales = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
    codes = layer.weight.data if layer.state.CB is None else layer.state.CB
    return codes.float() * scales.view(-1, 1) / 127


def saved(kind: str) -> Flow:
    """Saved quantized, and loaded again."""

    def run(folder: str) -> float:
        model = models.load(folder, kind)
        with tempfile.TemporaryDirectory() as again:
            model.save_pretrained(again)
            return models.distance([models.logits(models.load(again, None))], [models.logits(model)])

    return run


def checkpointed(kind: str, dora: bool, reentrant: bool) -> Flow:
    """The gradients of the adapter with gradient checkpointing, against those without."""

    def run(folder: str) -> float:
        from peft import prepare_model_for_kbit_training

        options = {"use_gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        model = models.lora(prepare_model_for_kbit_training(models.load(folder, kind), **options), use_dora=dora)
        whole = models.lora(
            prepare_model_for_kbit_training(models.load(folder, kind), use_gradient_checkpointing=False), use_dora=dora
        )
        return models.distance(models.gradients(model), models.gradients(whole))

    return run


def offloaded(kind: str | None, dora: bool = False) -> Flow:
    """The gradients of the adapter on a model in CPU memory and on disk, against the whole model."""

    def run(folder: str) -> float:
        model = models.lora(models.half_offloaded(models.load(folder, kind)), use_dora=dora)
        return models.distance(
            models.gradients(model), models.gradients(models.lora(models.load(folder, kind), use_dora=dora))
        )

    return run


def offloaded_saved(kind: str | None) -> Flow:
    """An offloaded model saved and loaded again."""

    def run(folder: str) -> float:
        model = models.half_offloaded(models.load(folder, kind))
        with tempfile.TemporaryDirectory() as again:
            model.save_pretrained(again)
            return models.distance(
                [models.logits(models.load(again, None))], [models.logits(models.load(folder, kind))]
            )

    return run


def offloaded_merged(kind: str | None) -> Flow:
    """The adapter merged into an offloaded model, against the whole one."""

    def run(folder: str) -> float:
        both = models.lora(models.half_offloaded(models.load(folder, kind))), models.lora(models.load(folder, kind))
        return models.distance(*([models.logits(model.merge_and_unload())] for model in both))

    return run


def adapter_again(kind: str) -> Flow:
    """An adapter saved, and loaded on a model that is loaded anew."""

    def run(folder: str) -> float:
        from peft import PeftModel

        model = models.lora(models.load(folder, kind))
        with tempfile.TemporaryDirectory() as adapter:
            model.save_pretrained(adapter)
            return models.distance(
                [models.logits(PeftModel.from_pretrained(models.load(folder, kind), adapter))], [models.logits(model)]
            )

    return run


def trainer(kind: str) -> Flow:
    """Four steps of the Trainer, against two, and two more resumed from a checkpoint."""

    def run(folder: str) -> float:
        from transformers import Trainer, TrainingArguments

        rows = [{"input_ids": IDS[i:] + IDS[:i], "labels": IDS[i:] + IDS[:i]} for i in range(8)]

        def train(out: str, steps: int, resume: bool = False) -> Any:
            model = models.lora(models.load(folder, kind))
            arguments = TrainingArguments(
                out, max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, seed=3,
                lr_scheduler_type="constant", learning_rate=1e-2, disable_tqdm=True,
            )  # fmt: skip
            Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume or None)
            return [p.detach() for p in model.parameters() if p.requires_grad]

        with tempfile.TemporaryDirectory() as out:
            whole = train(out, 4)
            for later in Path(out).glob("checkpoint-4/*"):
                later.unlink()
            (Path(out) / "checkpoint-4").rmdir()
            return models.distance(train(out, 4, resume=True), whole)

    return run


def graphs(kind: str, dora: bool, checkpointing: bool) -> Flow:
    """How many graphs a compiled train step is."""

    def run(folder: str) -> float:
        from patches.repairs.helpers.reproducers.graphs import pieces
        from peft import prepare_model_for_kbit_training

        options: dict[str, Any] = {"use_gradient_checkpointing": checkpointing}
        if checkpointing:
            options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
        model = models.lora(
            prepare_model_for_kbit_training(models.load(folder, kind), **options), use_dora=dora
        ).train()
        models.gradients(model)
        return pieces(lambda ids: model(input_ids=ids, labels=ids).loss, models.ids())

    return run


FLOWS: dict[str, Flow] = {
    **{f"{kind}: loaded": load(kind) for kind in KINDS},
    **{f"{kind}: saved, loaded again": saved(kind) for kind in KINDS},
    **{
        f"{kind}: {'DoRA' if dora else 'LoRA'}, {'reentrant' if reentrant else 'non-reentrant'} checkpoints":
        checkpointed(kind, dora, reentrant)
        for kind in KINDS for dora in (False, True) for reentrant in (False, True)
    },
    **{f"{kind}: adapter saved, loaded again": adapter_again(kind) for kind in KINDS},
    **{f"{kind}: Trainer, resumed": trainer(kind) for kind in KINDS},
    **{f"{kind or '16 bits'}: offloaded, LoRA": offloaded(kind) for kind in (None, *KINDS)},
    **{f"{kind}: offloaded, DoRA": offloaded(kind, dora=True) for kind in KINDS},
    **{f"{kind or '16 bits'}: offloaded, saved": offloaded_saved(kind) for kind in (None, *KINDS)},
    **{f"{kind or '16 bits'}: offloaded, merged": offloaded_merged(kind) for kind in (None, *KINDS)},
    **{
        f"{kind}: graphs, {'DoRA' if dora else 'LoRA'}{', checkpoints' if checkpointing else ''}":
        graphs(kind, dora, checkpointing)
        for kind in KINDS for dora in (False, True) for checkpointing in (False, True)
    },
}  # fmt: skip


def is_right(name: str, said: str) -> bool:
    """Whether what a flow said is what it should."""
    return said == ("1" if ": graphs" in name else "0")


if __name__ == "__main__":
    sys.exit(main())
