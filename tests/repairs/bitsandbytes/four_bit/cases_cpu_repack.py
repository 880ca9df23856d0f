"""What must hold on a CPU with AVX512-BF16. Not collected by itself: :mod:`.test_cpu_repack` runs it, on the
processor where it has the instruction and on the emulated one (:mod:`tests.processor`) everywhere.

The measure of everything is the same model told that its processor has not the instruction: it never repacks.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, has_avx512bf16
from bitsandbytes.nn import Linear4bit, Params4bit

import patches
from patches import REGISTRY
from patches.repairs.bitsandbytes.four_bit.cpu_repack import canonical_state

ID = "bitsandbytes-cpu-repack"
STORAGE = {"storage-uint8": torch.uint8, "storage-bfloat16": torch.bfloat16}
NESTED = pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def patched(unpatched):
    """Every case begins patched; ``patches.revert()`` in a case shows the defect."""
    assert has_avx512bf16(), "these cases are for a processor with AVX512-BF16, real or emulated"
    with patches.applied(ID):
        yield


def make(nested: bool = False, shape: tuple[int, int] = (128, 64), bias: bool = False, **options) -> Linear4bit:
    """A layer in eval mode, its rows of very different scale, as in trained models."""
    torch.manual_seed(0)
    options = {"compute_dtype": torch.bfloat16, "quant_type": "nf4", **options}
    layer = Linear4bit(*shape, bias=bias, compress_statistics=nested, **options)
    layer.weight.data.mul_(torch.logspace(-2, 1, shape[1])[:, None])
    return layer.bfloat16().to("cpu").eval()


def never(layer: torch.nn.Module) -> torch.nn.Module:
    """A copy of ``layer`` that never repacks."""
    layer = copy.deepcopy(layer)
    for module in layer.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return layer


def inputs(*shape: int, grad: bool = False) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*(shape or (5, 128))).bfloat16().requires_grad_(grad)


def infer(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer(x)


def holds_a_copy(layer: Linear4bit) -> bool:
    return "_patches_packed" in vars(layer.weight.untyped_storage())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def same_state(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Bit by bit equal, statistics included."""
    a, b = a.state_dict(), b.state_dict()
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k].flatten().view(torch.uint8), b[k].flatten().view(torch.uint8))
        for k in a
    )


def test_the_reproducer():
    """``verify`` cannot show it where the processor is emulated: present, absent, present again."""
    defect = REGISTRY.patches[ID].defect
    assert not defect()
    patches.revert()
    assert defect()
    with patches.applied(ID):
        assert not defect()
    assert defect()


# -- one layer -----------------------------------------------------------------------------------


@NESTED
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_an_eval_forward_changes_nothing(kind, storage, nested):
    layer = make(nested, quant_type=kind, quant_storage=STORAGE[storage])
    clean, weight = never(layer), dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    out = infer(layer, inputs())
    assert holds_a_copy(layer)
    assert relative(out, infer(clean, inputs())) < 0.01  # both round to bf16
    assert torch.equal(dequantize_4bit(layer.weight.data, layer.weight.quant_state), weight)
    assert vars(layer.weight.quant_state).keys() == vars(clean.weight.quant_state).keys()
    assert same_state(layer, clean)
    assert torch.equal(infer(layer, inputs()), out)  # after state_dict() too


@NESTED
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(5, 128), (2, 3, 128), (1, 128), (128,)], ids=str)
def test_the_kernel_is_kept_bit_by_bit(shape, kind, bias, nested):
    """The output of an eval forward is the one that bitsandbytes itself gives on this processor."""
    layer = make(nested, bias=bias, quant_type=kind)
    out = infer(layer, inputs(*shape))
    patches.revert()
    assert torch.equal(out, infer(layer, inputs(*shape)))
    assert layer.weight.quant_state.packing_format_for_cpu


@NESTED
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", ["e", "te", "ettee"])
def test_eval_and_train_in_any_order(order, bias, nested):
    layer = make(nested, bias=bias)
    clean = never(layer)
    for letter in order + "t":
        if letter == "e":
            infer(layer.eval(), inputs())
            continue
        results = []
        for model in (layer.train(), clean.train()):
            model.zero_grad()
            x = inputs(grad=True)
            out = model(x)
            out.float().square().sum().backward()
            results.append([out, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)])
        assert all(map(torch.equal, *results))
    assert same_state(layer, clean)


@pytest.mark.parametrize("shape", [(128, 48), (96, 128), (64, 100), (128, 20)], ids=str)
def test_shapes_that_the_kernel_cannot_compute(shape):
    layer = make(shape=shape, bias=True)
    assert torch.equal(infer(layer, inputs(3, shape[0])), infer(never(layer), inputs(3, shape[0])))
    patches.revert()
    with pytest.raises((AssertionError, RuntimeError)):
        infer(layer, inputs(3, shape[0]))


@NESTED
def test_inputs_that_the_kernel_reads_wrongly(nested):
    """It takes every row to be contiguous, and knows nothing of empty inputs."""
    layer = make(nested)
    transposed = inputs(128, 5).t()
    assert torch.equal(infer(layer, transposed), infer(layer, transposed.contiguous()))
    assert infer(layer, torch.empty(0, 128, dtype=torch.bfloat16)).shape == (0, 64)


def test_a_layer_from_an_older_release():
    """It never asked the processor; on other devices nothing does."""
    layer = make().train()
    del layer.support_avx512bf16_for_cpu
    assert canonical_state(layer) is layer.weight.quant_state


def test_a_bias_that_learns_in_eval_mode():
    layer = make(bias=True)
    layer(inputs()).float().sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((64,), 5.0, dtype=torch.bfloat16))


@NESTED
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_compiled_eval(warm, nested):
    layer, x = make(nested, bias=True), inputs()
    expected = infer(copy.deepcopy(layer), x)
    if warm:
        infer(layer, x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(infer(compiled, x), expected)
    assert same_state(layer, never(layer))
    with torch.no_grad():  # the graph holds no packed copy of its own
        layer.weight.copy_(torch.flip(layer.weight, [0]))
    assert torch.equal(infer(compiled, x), infer(copy.deepcopy(layer), x))
    assert not torch.equal(infer(compiled, x), expected)


# -- the packed copy -----------------------------------------------------------------------------


def write_weight(layer: Linear4bit, other: Linear4bit) -> None:
    with torch.no_grad():
        layer.weight.copy_(other.weight)


def assign_data(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight.data = other.weight.data.clone()


def assign_parameter(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight = copy.deepcopy(other.weight)


def write_scales(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight.quant_state.absmax.copy_(other.weight.quant_state.absmax)


def assign_scales(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight.quant_state.absmax = other.weight.quant_state.absmax.clone()


@NESTED
@pytest.mark.parametrize("change", [write_weight, assign_data, assign_parameter, write_scales, assign_scales])
def test_follows_the_weight(change, nested):
    layer, x = make(nested), inputs()
    other = make(nested, shape=(128, 64))
    other.weight = Params4bit(torch.randn(64, 128), compress_statistics=nested, quant_type="nf4").to("cpu")
    before = infer(layer, x)
    change(layer, other)
    after = infer(layer, x)
    assert not torch.equal(after, before)
    assert torch.equal(after, infer(copy.deepcopy(layer), x))


def test_is_freed_with_training_and_with_the_weight():
    layer = make()
    infer(layer, inputs())
    layer.train()(inputs())
    assert not holds_a_copy(layer)

    infer(layer.eval(), inputs())
    packed = weakref.ref(layer.weight.untyped_storage()._patches_packed.packed)
    assert packed() is not None
    layer.weight = copy.deepcopy(layer.weight)
    gc.collect()
    assert packed() is None


def test_does_not_travel_in_copies_and_pickles():
    layer = make()
    before = io.BytesIO()
    torch.save(layer, before)
    infer(layer, inputs())
    after = io.BytesIO()
    torch.save(layer, after)
    assert after.getvalue() == before.getvalue()
    assert not holds_a_copy(copy.deepcopy(layer))


# -- weights that were repacked before the patch ---------------------------------------------------


def damaged(nested: bool) -> tuple[Linear4bit, Linear4bit]:
    layer = make(nested)
    clean = never(layer)
    patches.revert()
    infer(layer, inputs())
    assert layer.weight.quant_state.packing_format_for_cpu
    report = patches.apply(ID)
    assert any("repacked" in note for note in report[ID].notes)
    return layer, clean


def scales(layer: Linear4bit) -> torch.Tensor:
    state = layer.weight.quant_state
    if not state.nested:
        return state.absmax
    return bitsandbytes.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset


@NESTED
@pytest.mark.parametrize("first", ["eval", "train", "state_dict"])
def test_a_weight_repacked_before_is_unpacked(first, nested):
    layer, clean = damaged(nested)
    if first == "state_dict":
        layer.state_dict()
    else:
        infer(layer.train(first == "train"), inputs())
    assert torch.equal(layer.weight, clean.weight)  # the codes, exactly
    assert torch.equal(scales(layer), scales(clean).bfloat16().float())  # the scales, as rounded
    assert not layer.weight.quant_state.packing_format_for_cpu
    if not nested:  # the largest of bf16 numbers is one
        assert torch.equal(scales(layer), scales(clean))
    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert relative(weight, dequantize_4bit(clean.weight.data, clean.weight.quant_state)) < 0.005
    x = inputs(grad=True)
    layer.train()(x).float().sum().backward()
    assert x.grad is not None


# -- whole models: transformers, peft, the Trainer -------------------------------------------------


def checkpoint(where, biases: bool, tied: bool) -> str:
    """A tiny Llama (or Qwen2: attention with biases) on disk."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config, model = (
        (transformers.Qwen2Config, transformers.Qwen2ForCausalLM)
        if biases
        else (transformers.LlamaConfig, transformers.LlamaForCausalLM)
    )
    torch.manual_seed(0)
    saved = model(config(vocab_size=128, num_key_value_heads=2, tie_word_embeddings=tied, **sizes))
    for name, parameter in saved.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2 if "bias" in name else 0.06)
    saved.bfloat16().save_pretrained(where)
    return str(where)


def load(path: str, repacks: bool = True, nested: bool = True) -> torch.nn.Module:
    import transformers

    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, quantization_config=how, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    for module in model.modules():
        if isinstance(module, Linear4bit) and not repacks:
            module.support_avx512bf16_for_cpu = False
    return model


def lora(model: torch.nn.Module) -> torch.nn.Module:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config)


def ids() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randint(0, 128, (2, 8))


@pytest.fixture(params=[(False, False), (True, True)], ids=["llama", "qwen2-tied"])
def path(request, tmp_path):
    return checkpoint(tmp_path / "model", *request.param)


@NESTED
def test_saved_dequantized_and_alive_after_eval(path, nested, tmp_path):
    model, clean = load(path, nested=nested), load(path, repacks=False, nested=nested)
    logits = infer(model.eval(), ids()).logits
    assert relative(logits, infer(clean.eval(), ids()).logits) < 0.05
    assert same_state(model, clean)

    model.save_pretrained(tmp_path / "again")
    reloaded = load(str(tmp_path / "again"), repacks=False)
    assert same_state(reloaded, clean)
    assert torch.equal(infer(reloaded.eval(), ids()).logits, infer(clean, ids()).logits)
    assert torch.equal(infer(model, ids()).logits, logits)  # the live model afterwards

    dense, expected = model.dequantize(torch.bfloat16), clean.dequantize(torch.bfloat16)
    assert torch.equal(infer(dense, ids()).logits, infer(expected, ids()).logits)


def test_adapters_after_eval(path):
    model, clean = lora(load(path)), lora(load(path, repacks=False))
    for _ in range(2):
        infer(model.eval(), ids())
        grads = []
        for each in (model.train(), clean.train()):
            each.zero_grad()
            each(input_ids=ids(), labels=ids()).loss.backward()
            grads.append({n: p.grad for n, p in each.named_parameters() if p.requires_grad})
        assert all(g is not None for g in grads[0].values())
        assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[1])

    infer(model.eval(), ids())
    merged, expected = model.merge_and_unload(), clean.eval().merge_and_unload()
    assert same_state(merged, expected)


def test_trainer_that_evaluates_between_steps(tmp_path):
    """Unpatched, the step after the first evaluation raises: Qwen2 has biases."""
    import transformers

    path = checkpoint(tmp_path / "model", biases=True, tied=False)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (8, 8)).tolist()]

    def losses(evaluate: bool) -> list[float]:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            eval_strategy="steps" if evaluate else "no",
            eval_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(lora(load(path)), arguments, train_dataset=data, eval_dataset=data[:2])
        trainer.train()
        assert evaluate == any("eval_loss" in entry for entry in trainer.state.log_history)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses(evaluate=False)
    assert len(expected) == 4 and len(set(expected)) == 4
    assert losses(evaluate=True) == expected
