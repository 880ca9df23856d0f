"""Say what will go wrong with a model, and what to do: read from its state, nothing is tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..experts import dense_operations
from ..process.byte_sizes import format_bytes
from .adapters import Found
from .layers import Layer, holds_experts
from .records import Checkpointing, OptimizerState, Problem, Training
from .tensors import dtype_name, own_parameters
from .training import Named
from .transformers_names import Naming

REPAIRS, PREVENTS, WARNS, RAISES = (
    "repairs it",
    "prevents it if it is applied before",
    "warns of it",
    "raises an error instead",
)

HALF = ("float16", "bfloat16")
FAULTS: Mapping[tuple[str, str], tuple[str, str, str, str]] = {
    ("4", "plain"): (
        "4-bit layers hold a plain weight in floating point (a tied head, an old skip list): forward raises an error",
        "Add their names to llm_int8_skip_modules and load again, or replace them by nn.Linear.",
        "bitsandbytes-linear4bit-plain-weight",
        REPAIRS,
    ),
    ("8", "plain"): (
        "INT8 layers hold a plain weight (a tied head): 'Parameter' object has no attribute 'CB'",
        "Add their names to llm_int8_skip_modules and load again.",
        "bitsandbytes-int8-plain-weight",
        REPAIRS,
    ),
    ("", "not quantized yet"): (
        "layers were never quantized: forward raises an error, or computes with unquantized weights",
        "Move them to a device: model.to('cuda'), or .to('cpu') on a CPU.",
        "",
        "",
    ),
    ("4", "no state"): (
        "packed 4-bit weights have no quantization state (absmax): forward raises an error",
        "Load the checkpoint again: absmax cannot be computed from packed weights.",
        "bitsandbytes-linear4bit-load-state-dict",
        PREVENTS,
    ),
    ("8", "no scales"): (
        "packed INT8 weights have no row scales (SCB): they are quantized a second time, and outputs are 2000 times off",
        "Load the checkpoint again: row scales cannot be computed from packed weights.",
        "bitsandbytes-int8-scales-lost-on-offload",
        RAISES,
    ),
    ("4", "scales elsewhere"): (
        "the quantization state of 4-bit weights is on another device than the packed weights",
        "Load the model again after patches.apply(), and move whole layers with module.to(device).",
        "bitsandbytes-params4bit-meta",
        PREVENTS,
    ),
    ("8", "scales elsewhere"): (
        "the row scales (SCB) of INT8 weights are on another device than the packed weights",
        "Move whole layers with module.to(device), not their weights.",
        "bitsandbytes-int8-meta-moves",
        PREVENTS,
    ),
    ("8", "resident"): (
        "packed weights of offloaded INT8 layers stayed on the execution device after forward: offloading saves no memory",
        "Call patches.apply() before the first forward.",
        "accelerate-int8-offload-resident-weights",
        PREVENTS,
    ),
    ("4", "packed"): (
        "an eval forward (AVX512-BF16) repacked 4-bit weights in place: training or merging them gives wrong results",
        "Load the model again after patches.apply().",
        "bitsandbytes-cpu-repack",
        PREVENTS,
    ),
}
"""What goes wrong, the remedy, the patch and its effect, by the bits of the layer's class and the fault of its weight."""


def find_problems(
    layers: Sequence[Layer],
    adapters: Found,
    parameters: Named,
    training: Training,
    on: Checkpointing | None,
    optimizer: OptimizerState | None,
    naming: Naming,
) -> Iterator[Problem]:
    yield from _of_weights(layers)
    yield from _of_experts(layers, naming)
    yield from _of_dense(layers)
    yield from _of_compute(layers, naming)
    yield from _of_adapters(adapters, training)
    yield from _of_gradients(training, on)
    if optimizer is not None:
        yield from _of_optimizer(optimizer)
    yield from _of_float16(parameters, optimizer)


def _of_weights(layers: Iterable[Layer]) -> Iterator[Problem]:
    where: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        if layer.weight.fault and not layer.lost:
            bits = "" if layer.weight.fault == "not quantized yet" else layer.weight.bits
            where.setdefault((bits, layer.weight.fault), []).append(layer.name)
    for key, names in where.items():
        what, remedy, patch, effect = FAULTS[key]
        yield Problem(what, tuple(names), remedy, patch, effect=effect)
    if lost := [layer.name for layer in layers if layer.lost]:
        yield Problem(
            "layers are on the meta device, and no hook of accelerate loads their weights: they have no values",
            tuple(lost),
            "Load them (from_pretrained, load_state_dict(assign=True)) or dispatch the model again.",
        )


def _of_experts(layers: Sequence[Layer], naming: Naming) -> Iterator[Problem]:
    left = [layer for layer in layers if holds_experts(layer)]
    share = sum(layer.weight.parameters for layer in left) / max(1, sum(layer.weight.parameters for layer in layers))
    if not naming.quantized or share < 0.1:
        return
    kept = sorted({dtype_name(p) for layer in left for p in own_parameters(layer.module)})
    yield Problem(
        f"{share:.0%} of the parameters are 3-D expert parameters and not quantized: "
        f"{format_bytes(sum(layer.bytes for layer in left))} of {' and '.join(kept)}",
        tuple(layer.name for layer in left),
        "patches.quantize_experts(model) quantizes them. Otherwise peft's "
        "prepare_model_for_kbit_training casts them to float32: cast them back with module.to(torch.bfloat16) and "
        "train under autocast (bf16=True).",
        "peft-upcasts-experts" if "float32" in kept else "transformers-experts-not-quantized",
        effect=WARNS,
    )


def _of_dense(layers: Sequence[Layer]) -> Iterator[Problem]:
    quantized = tuple(layer.name for layer in layers if layer.weight.quantized.partition(",")[0].endswith(" experts"))
    if quantized and (found := dense_operations.dense_summary()):
        yield Problem(
            f"operations in this process dequantized all experts of a parameter at once: {found}",
            quantized,
            "The results are right, but the operations need the memory of experts in floating point. For LoRA on experts, "
            "apply the patch. In your own code, use one expert at a time (experts[i]) or a product (torch.bmm, grouped_mm).",
            "torch-quantized-experts",
            effect=PREVENTS,
        )


def _of_compute(layers: Sequence[Layer], naming: Naming) -> Iterator[Problem]:
    weights = {layer.name: layer.weight for layer in layers}
    slow = [name for name, w in weights.items() if w.compute == "float32" and w.dequantized_dtype in HALF]
    if not slow:
        return
    asked = str(naming.setting("bnb_4bit_compute_dtype")).removeprefix("torch.")
    if asked == "float32":
        cause, patch = "the default of bnb_4bit_compute_dtype", ""
    else:
        cause = f"although {asked} was asked for" if asked in HALF else "set by the program, or by their first input"
        patch = "bitsandbytes-linear4bit-compute-dtype"
    yield Problem(
        f"4-bit layers of a 16-bit model compute in float32 ({cause}), which is slower and needs more memory",
        tuple(slow),
        "Set bnb_4bit_compute_dtype=torch.bfloat16 when loading, or compute_dtype when creating a layer.",
        patch,
        effect=PREVENTS if patch else "",
    )


def _of_adapters(adapters: Found, training: Training) -> Iterator[Problem]:
    meta: dict[str, list[str]] = {}
    for (kind, _), entry in adapters.items():
        copied = kind in ("modules_to_save", "trainable_tokens")
        patch = "peft-modules-to-save-offloaded" if copied else "peft-adapters-on-meta"
        if names := [name for name, tensor in entry.tensors.values() if tensor.is_meta]:
            meta.setdefault(patch, []).extend(names)
    for patch, names in meta.items():
        yield Problem(
            "adapters of offloaded layers are on the meta device: they have no values and do not train",
            tuple(names),
            "Add adapters before the model is dispatched.",
            patch,
            effect=PREVENTS,
        )
    for (kind, name), entry in adapters.items():
        trains = [key for key, tensor in entry.tensors.values() if tensor.requires_grad]
        if entry.merged and trains:
            yield Problem(
                f"the {kind} adapter {name!r} should train and is merged into {entry.merged} layers: it gets no gradient",
                tuple(trains),
                "Call unmerge_adapter() before training.",
            )
    if adapters and not training.tensors:
        yield Problem(
            "the model has adapters, but no parameter requires grad",
            (),
            "To train: PeftModel.from_pretrained(..., is_trainable=True), or model.set_adapter(name).",
        )


def _of_gradients(training: Training, on: Checkpointing | None) -> Iterator[Problem]:
    if on is not None and on.idle and training.tensors:
        reentrant = "reentrant" in on.idle
        yield Problem(
            f"gradient checkpointing is on in {on.layers} layers but does nothing: {on.idle}; "
            + ("parameters in them get no gradient" if reentrant else "all activations are kept"),
            (),
            "Call model.enable_input_require_grads(), or pass use_reentrant=False."
            if reentrant
            else "Call model.train() before training.",
            "" if reentrant else "transformers-checkpointing-in-eval",
            effect="" if reentrant else WARNS,
        )
    if training.without_gradient:
        yield Problem(
            f"{len(training.without_gradient)} of {training.tensors} parameters that require grad got no gradient "
            + ("in the last backward" if training.gradients else "in any step of the optimizer"),
            training.without_gradient,
            "The loss does not depend on them, or a part of the model detaches its output. Only parameters that no token "
            "reached, such as those of experts, may have no gradient.",
        )


def _of_optimizer(optimizer: OptimizerState) -> Iterator[Problem]:
    if optimizer.sharded and not optimizer.stepped and optimizer.kind.startswith("bitsandbytes"):
        limits_norms = "LAMB" in optimizer.kind or "LARS" in optimizer.kind
        yield Problem(
            f"an optimizer of bitsandbytes updates {optimizer.sharded} sharded tensors (FSDP2): step() raises an error",
            (),
            "Use an optimizer of torch, such as AdamW, or of torchao.optim for 8-bit state.",
            patch="" if limits_norms else "bitsandbytes-steps-on-shards",
            effect="" if limits_norms else REPAIRS,
        )
    if optimizer.outside:
        yield Problem(
            f"the optimizer updates {optimizer.outside} parameters that are not in the model",
            (),
            "Create the optimizer after all changes to the model (adapters, casts, moves, sharding).",
        )
    if optimizer.missing:
        yield Problem(
            f"{len(optimizer.missing)} parameters require grad and are not in the optimizer",
            optimizer.missing,
            "Create the optimizer after all changes to the model, from all parameters that require grad.",
        )


def _of_float16(parameters: Named, optimizer: OptimizerState | None) -> Iterator[Problem]:
    names = tuple(name for name, p in parameters.items() if dtype_name(p) == "float16")
    if not names:
        return
    over = " with an 8-bit optimizer" if optimizer is not None and optimizer.bits == 8 else ""
    yield Problem(
        f"parameters train in float16{over}: GradScaler refuses their gradients, and updates below "
        "0.02 % of a parameter are rounded away",
        names,
        "Keep these parameters in float32 (adapters: autocast_adapter_dtype=True) or bfloat16.",
    )
