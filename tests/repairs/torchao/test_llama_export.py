"""From a checkpoint to an exported program, as an exporter does it, with a cast on the way."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
utils = pytest.importorskip("torchao.utils", reason="torchao is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup

import patches

PATHS = {
    "unwrapped": (
        "torchao-unwrap-frozen-dtype",
        lambda model: utils.unwrap_tensor_subclass(model).to(torch.float32),
    ),
    "native": ("torchao-cast-drops-dtype", lambda model: model.float()),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A bfloat16 Llama of two layers on disk."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return str(path)


def quantized(path: str) -> torch.nn.Module:
    """8-bit embeddings, 4-bit linear layers with 8-bit dynamic activations: what mobile exporters use."""
    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    embeddings = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    quantize_(model, embeddings, lambda module, name: isinstance(module, torch.nn.Embedding))
    quantize_(model, Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)))
    return model


@torch.no_grad()
@pytest.mark.parametrize("path", PATHS)
def test_exported_llama_is_eager(checkpoint, tmp_path, path):
    patch, cast = PATHS[path]
    ids = torch.arange(8).view(1, 8) * 13
    expected = quantized(checkpoint).to(torch.float32)(ids).logits  # native weights, cast as torchao means it
    with patches.applied(patch):
        model = cast(quantized(checkpoint))
        logits = model(ids).logits
        program = torch.export.export(model, (ids,))
    assert logits.dtype == torch.float32 and torch.equal(logits, expected)
    written = [n.meta["val"].dtype for n in program.graph.nodes if "dequantize_affine" in str(n.target)]
    assert len(written) >= 15 and set(written) == {torch.float32}
    torch.export.save(program, tmp_path / "llama.pt2")
    loaded = torch.export.load(tmp_path / "llama.pt2")
    assert torch.equal(loaded.module()(ids).logits, expected)
