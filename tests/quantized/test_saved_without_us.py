"""What is saved while patches are applied names neither ``patches`` nor ``bnb_patches``, and loads where we are not."""

from __future__ import annotations

import copy
import io
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import patches  # noqa: E402

IDS = torch.arange(8).reshape(2, 4)


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=128
    )
    return transformers.LlamaForCausalLM(config)


def quantized(folder: Path, bits: int) -> Any:
    llama().save_pretrained(folder)
    wanted = transformers.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=wanted, device_map="cpu")


def prepared(folder: Path, bits: int) -> Any:
    """The program of every tutorial; the hook on the embedding stays."""
    return peft.prepare_model_for_kbit_training(quantized(folder, bits))


def adapted(folder: Path, **options: Any) -> Any:
    model = quantized(folder, options.pop("bits", 4))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2, **options))
    model(input_ids=IDS, labels=IDS).loss.backward()
    return model


def own_model() -> Any:
    """One that is not of transformers: peft registers a hook of its own."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(4, 4)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embedding

    model = Model()
    model.is_loaded_in_4bit = True
    model.gradient_checkpointing_enable = print  # type: ignore[assignment]
    return peft.prepare_model_for_kbit_training(model).embedding


def trained(make: Callable[[], Any]) -> Any:
    layer = make()
    layer(torch.randn(3, 64, requires_grad=True)).sum().backward()
    return layer


def optimizer(kind: str) -> Any:
    layer = torch.nn.Linear(64, 128)
    steps = getattr(bnb.optim, kind)(layer.parameters(), lr=1e-3, **({"min_8bit_size": 16} if "8" in kind else {}))
    layer(torch.randn(2, 64)).sum().backward()
    steps.step()
    return steps.state_dict()


def dispatched(folder: Path) -> Any:
    from accelerate import cpu_offload

    model = quantized(folder, 4)
    return cpu_offload(model, torch.device("cpu"))


def eight(**options: Any) -> Any:
    return bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False, **options).to("cpu")


def four(**options: Any) -> Any:
    return bnb.nn.Linear4bit(64, 32, compute_dtype=torch.float32, quant_type="nf4", **options).to("cpu")


MADE: dict[str, Callable[[Path], Any]] = {
    "Linear4bit": lambda _: trained(four),
    "Linear4bit, double quantization": lambda _: trained(lambda: four(compress_statistics=True)),
    "Linear8bitLt": lambda _: trained(eight),
    "Linear8bitLt with outliers": lambda _: trained(lambda: eight(threshold=6.0)),
    "a deep copy": lambda _: copy.deepcopy(trained(eight)),
    "its weight": lambda _: trained(eight).weight,
    "EmbeddingNF4": lambda _: bnb.nn.EmbeddingNF4(16, 64).to("cpu"),
    "StableEmbedding": lambda _: bnb.nn.StableEmbedding(16, 8),
    "a state dict": lambda _: trained(four).state_dict(),
    "a model": lambda folder: quantized(folder, 4),
    "a model in 8 bits": lambda folder: quantized(folder, 8),
    "prepared": lambda folder: prepared(folder, 4),
    "prepared, in 8 bits": lambda folder: prepared(folder, 8),
    "prepared, of one's own": lambda _: own_model(),
    "LoRA": lambda folder: adapted(folder),
    "LoRA, 8 bits": lambda folder: adapted(folder, bits=8),
    "DoRA": lambda folder: adapted(folder, use_dora=True),
    "offloaded": dispatched,
    "Adam8bit": lambda _: optimizer("Adam8bit"),
    "AdEMAMix": lambda _: optimizer("AdEMAMix"),
}
LOAD = """
import sys
import bitsandbytes, peft, torch, transformers
assert "bnb_patches" not in sys.modules, "PATCHES_AUTOLOAD is off"
for name in ("patches", "bnb_patches"):
    sys.modules[name] = None
for file in sys.argv[1:]:
    torch.load(file, weights_only=False)
"""


def saved(subject: Any, file: Path) -> str:
    """Write ``subject``; the error, if that is what comes of it."""
    try:
        torch.save(subject, file)
    except Exception as error:
        return type(error).__name__
    return ""


def names(file: Path) -> set[str]:
    """The modules that the pickles in ``file`` name."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        read = list(pickletools.genops(io.BytesIO(archive.read(name))))
    texts = [str(argument) for _, argument, _ in read if isinstance(argument, str)]
    return {text.partition(".")[0].partition(" ")[0] for text in texts}


def test_what_is_saved_names_nothing_of_ours_and_loads_without_us(forked, tmp_path):
    files = []
    for number, (name, make) in enumerate(MADE.items()):
        file = tmp_path / f"{number}.pt"
        as_is = ""
        try:
            as_is = saved(make(tmp_path / f"{number}"), file)
        except Exception as error:  # what cannot be made without the plugin
            as_is = f"not made: {type(error).__name__}"
        with patches.applied(strict=False):
            try:
                subject = make(tmp_path / f"{number}")
            except Exception:  # 8-bit optimizers of older releases need a GPU
                assert as_is.startswith("not made"), name
                continue
            with_us = saved(subject, file)
        assert not with_us or with_us == as_is, f"{name}: saving raises {with_us}, and {as_is or 'nothing'} as is"
        if not with_us:
            assert names(file).isdisjoint({"patches", "bnb_patches"}), name
            files.append(str(file))
    assert len(files) > len(MADE) / 2
    forked(LOAD, *files)


def test_the_hook_saved_with_what_it_names_is_torchs_own():
    """As cloudpickle saves it: by value, with the globals of its code."""
    import pickle

    from patches.adapters.input_grads import require_grads

    data = pickle.dumps(require_grads)
    assert b"patches" not in data
    output = torch.zeros(2)
    assert pickle.loads(data)(output) is output and output.requires_grad
