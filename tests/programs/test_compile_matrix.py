"""A whole fine-tuning step is one graph: models from disk, through transformers, peft and the Trainer.

The quick subset runs by default, every cell with ``-m slow``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import patches

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
MODELS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),  # its attention has biases
}
KINDS = ("nf4", "nf4-dora", "int8-6-gpu", "int8-0-gpu", "int8-0", "int8-6-dora-gpu", "int8-0-dora")
CHECKPOINTS = {"plain": None, "reentrant": {"use_reentrant": True}, "non-reentrant": {"use_reentrant": False}}
QUICK = {
    ("llama", "nf4-dora", "non-reentrant", "cold"),
    ("llama", "int8-6-dora-gpu", "non-reentrant", "warm"),
}
"""A 4-bit step under reentrant checkpointing is compiled by test_other_lengths_compile_once_more."""
CELLS = [
    pytest.param(*cell, id="-".join(cell), marks=[] if cell in QUICK else [pytest.mark.slow])
    for cell in itertools.product(MODELS, KINDS, CHECKPOINTS, ("cold", "warm"))
]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each model, randomly initialized in bfloat16, saved as a user's would be."""
    folders = {}
    for name, layers in (("llama", 1), ("qwen2", 1), ("llama", 2)):
        torch.manual_seed(0)
        folder = folders[f"{name}-{layers}"] = str(tmp_path_factory.mktemp(name))
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        config = MODELS[name][0](**SIZES, **heads, num_hidden_layers=layers, max_position_embeddings=64)
        model = MODELS[name][1](config).to(torch.bfloat16)
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                torch.nn.init.normal_(parameter)
        model.save_pretrained(folder)
    return folders


@contextlib.contextmanager
def routed(kind: str) -> Iterator[None]:
    """For a kind that ends in "-gpu": train through MatMul8bitLt, as on a GPU, also on a CPU.

    Inside ``patches.applied()``, never around it: a patch must find the function that has the name.
    """
    functions = bnb.autograd._functions
    with pytest.MonkeyPatch.context() as monkeypatch:
        if kind.endswith("-gpu") and hasattr(functions, "MatMul8bitFp"):
            monkeypatch.setattr(functions, "MatMul8bitFp", functions.MatMul8bitLt)
        yield


def load(folder: str, kind: str, checkpointing: dict | None = None) -> torch.nn.Module:
    """The model as a QLoRA script makes it, its adapter saved and loaded back."""
    quantization = {}
    if kind.startswith("nf4"):
        options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **options)
        quantization = {"quantization_config": config}
    elif kind.startswith("int8"):
        threshold = float(kind.split("-")[1])
        config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
        quantization = {"quantization_config": config}
    # torch.device, for accelerate takes the string "cpu" for a GPU
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": torch.device("cpu")}, **quantization
    )
    base.config.use_cache = False
    if quantization:
        base = peft.prepare_model_for_kbit_training(
            base, use_gradient_checkpointing=bool(checkpointing), gradient_checkpointing_kwargs=checkpointing
        )
    elif checkpointing:
        base.enable_input_require_grads()
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    adapter = Path(folder) / f"adapter-{kind}"
    torch.manual_seed(1)
    if not adapter.exists():
        lora = peft.LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, use_dora="dora" in kind, task_type="CAUSAL_LM"
        )
        made = peft.get_peft_model(base, lora)
        made.save_pretrained(adapter)
        return load(folder, kind, checkpointing)
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).train()


def batch(length: int = 16) -> dict[str, torch.Tensor]:
    torch.manual_seed(length)
    ids = torch.randint(0, SIZES["vocab_size"], (2, length))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def step(call: Callable, model: torch.nn.Module, **inputs: torch.Tensor) -> list[torch.Tensor]:
    """The loss and every gradient, in float32, of one training step."""
    model.zero_grad()
    loss = call(**(inputs or batch())).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None for g in gradients), "a gradient is missing"
    return [t.detach().float().clone() for t in (loss, *gradients)]


def evaluate(call: Callable, model: torch.nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return call(**batch()).logits.float()


def distance(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error over all tensors."""
    assert len(got) == len(expected)
    pairs = zip(got, expected, strict=True)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)


@cache
def eager(folder: str, kind: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What an unpatched, uncompiled step and an eval forward give. Checkpointing does not change it.

    Unpatched, DoRA on INT8 does not run on a CPU: it is given the one patch that it needs for that.
    """
    assert not patches.report().with_status(patches.Status.APPLIED)
    needed = ["peft-dora-replaces-weight"] if kind.startswith("int8") and "dora" in kind else []
    with patches.applied(*needed) if needed else contextlib.nullcontext(), routed(kind):
        model = load(folder, kind)
        return step(model, model), evaluate(model, model)


@pytest.mark.parametrize(("name", "kind", "checkpointing", "temperature"), CELLS)
def test_a_step_is_one_graph(saved, name, kind, checkpointing, temperature):
    folder = saved[f"{name}-1"]
    expected, _ = eager(folder, kind)
    with patches.applied(), routed(kind):
        model = load(folder, kind, CHECKPOINTS[checkpointing])
        if temperature == "warm":
            assert distance(step(model, model), expected) == 0, "eager changed"
        counter = CompileCounterWithBackend("aot_eager")
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for _ in range(2):
            got = step(compiled, model)
        assert counter.frame_count == 1
        # What runs is what eager runs, operation by operation: as without quantization, nothing differs.
        assert distance(got, expected) == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*cell, marks=[] if cell == ("qwen2", "int8-6-gpu") else [pytest.mark.slow])
        for cell in itertools.product(MODELS, KINDS)
    ],
)
def test_eval_is_one_graph(saved, name, kind):
    folder = saved[f"{name}-1"]
    _, expected = eager(folder, kind)
    with patches.applied(), routed(kind):
        model = load(folder, kind)
        counter = CompileCounterWithBackend("aot_eager")
        torch.compiler.reset()
        logits = evaluate(torch.compile(model, fullgraph=True, backend=counter), model)
    assert counter.frame_count == 1
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8-6-gpu", marks=pytest.mark.slow)])
def test_other_lengths_compile_once_more(saved, kind):
    with patches.applied(), routed(kind):
        model = load(saved["llama-1"], kind, CHECKPOINTS["reentrant"])
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for length in (16, 24, 12, 31):
            assert distance(step(compiled, model, **batch(length)), step(model, model, **batch(length))) < 1e-2
        assert counter.frame_count == 2


@pytest.mark.parametrize("kind", ["nf4", "int8-6-gpu"])
@pytest.mark.slow
def test_regional_compilation(saved, kind):
    from accelerate.utils import compile_regions

    folder = saved["llama-2"]
    expected, _ = eager(folder, kind)
    with patches.applied(), routed(kind):
        model = load(folder, kind, CHECKPOINTS["reentrant"])
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = compile_regions(model, fullgraph=True, backend=counter)
        assert distance(step(compiled, model), expected) == 0
    # Embedding, rotary embedding, one graph for both decoder layers, norm, head.
    assert counter.frame_count == 5


def trained(folder: str, kind: str, tmp_path, compile: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and adapter weights after three steps of the Trainer."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    model = load(folder, kind)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        torch_compile=compile,
        torch_compile_backend="aot_eager" if compile else None,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    rows = [{key: value[0] for key, value in batch().items()} for _ in range(8)]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {k: v.detach().clone() for k, v in model.named_parameters() if v.requires_grad}


@pytest.mark.parametrize("kind", ["nf4", *(pytest.param(k, marks=pytest.mark.slow) for k in ("nf4-dora", "int8-0"))])
def test_trainer(saved, tmp_path, kind):
    losses, weights = trained(saved["llama-1"], kind, tmp_path, compile=False)
    with patches.applied():
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        got_losses, got_weights = trained(saved["llama-1"], kind, tmp_path, compile=True)
        stats = torch._dynamo.utils.counters
        assert stats["stats"]["unique_graphs"] == 1 and not stats["graph_break"]
        assert stats["frames"]["total"] == stats["frames"]["ok"] == 1
    assert got_losses == losses and len(losses) == 3
    assert got_weights.keys() == weights.keys()
    assert all(torch.equal(got_weights[k], weights[k]) for k in weights)
