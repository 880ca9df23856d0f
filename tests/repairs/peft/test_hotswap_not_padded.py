"""Adapters of different ranks are swapped in a compiled quantized model, without a graph more."""

from __future__ import annotations

import pytest
import torch

import patches
from patches.repairs.reproducers import adapted_layer

peft = pytest.importorskip("peft", minversion="0.16", reason="the defect was shown from peft 0.16 on")
pytest.importorskip("bitsandbytes")

ID = "peft-hotswap-not-padded"


def adapted(kind: str, rank: int, seed: int) -> torch.nn.Module:
    base, _ = adapted_layer.quantized_model(kind == "int8")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * seed, target_modules=["0"], init_lora_weights=False)
    return peft.get_peft_model(base, config).eval()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_padded_adapter_computes_the_same(kind):
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap

    model, x = adapted(kind, 4, 1), torch.randn(3, 64)
    with torch.no_grad():
        expected = model(x)
        with patches.applied(ID):
            prepare_model_for_compiled_hotswap(model, target_rank=8)
        torch.testing.assert_close(model(x), expected)
    lora = model.base_model.model[0]
    assert type(lora).__module__ == "peft.tuners.lora.bnb"
    assert lora.lora_A["default"].weight.shape == (8, 64) and lora.lora_B["default"].weight.shape == (64, 8)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_compiled_model_takes_an_adapter_of_a_higher_rank(kind, tmp_path):
    from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

    other, x, graphs = adapted(kind, 8, 2), torch.randn(3, 64), []
    other.save_pretrained(tmp_path)

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    with patches.applied(), torch.no_grad():
        model = adapted(kind, 4, 1)
        prepare_model_for_compiled_hotswap(model, target_rank=8)
        compiled = torch.compile(model, backend=count, fullgraph=True)
        before = compiled(x)
        hotswap_adapter(compiled, str(tmp_path), adapter_name="default")
        after = compiled(x)
        expected = other(x)
    assert len(graphs) == 1
    torch.testing.assert_close(after, expected)
    assert not torch.allclose(before, after)
