"""One program of a user for each group of patches: it fails without the plugin and is right with it.

`make stacks` runs all of :mod:`tests.stacks.flows`, on every stack of the table.
"""

from __future__ import annotations

import json
import sys
import tempfile

import pytest

from patches.symptoms import GROUPS
from tests.releases import is_newest
from tests.stacks import flows

pytestmark = pytest.mark.skipif(
    not is_newest(),
    reason="an older bitsandbytes has other defects: `make stacks` runs all flows on each stack of the table",
)

OF_A_GROUP = {
    "train": "INT8: DoRA, non-reentrant checkpoints",
    "from_pretrained": "4-bit: checkpoint in another dtype",
    "compile": "4-bit: graphs, LoRA, checkpoints",
    "offload": "4-bit: device map, LoRA",
    "save": "INT8: offloaded, saved",
    "layers": "4-bit: LongT5",
    "merge": "16 bits: offloaded, merged",
    "experts": "4-bit: experts, saved, loaded again",
    "move": "4-bit: dequantized, offloaded",
    "shard": "4-bit: FSDP2, checkpoint, full state dict",
    "cpu": "INT8: DoRA, reentrant checkpoints",
}


def long_t5(folder: str) -> float:
    """How far the outputs of a LongT5 in 4 bits are from those in full precision, if that is more than rounding."""
    import torch
    from transformers import BitsAndBytesConfig, LongT5Config, LongT5ForConditionalGeneration

    torch.manual_seed(0)
    size = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    with tempfile.TemporaryDirectory() as saved:
        LongT5ForConditionalGeneration(LongT5Config(**size, decoder_start_token_id=0)).save_pretrained(saved)
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        load = LongT5ForConditionalGeneration.from_pretrained
        models = [load(saved, dtype=torch.float32, quantization_config=config).eval() for config in (None, four_bits)]
    ids = torch.arange(2, 34)[None]
    with torch.no_grad():
        whole, quantized = (model(input_ids=ids, decoder_input_ids=ids[:, :8]).logits for model in models)
    error = float((quantized - whole).norm() / whole.norm())
    return 0.0 if error < 0.5 else error


def run() -> None:
    """Print what the flows give that the command line names."""
    flows.FLOWS["4-bit: LongT5"] = long_t5
    flows.main(sys.argv[1:])


@pytest.fixture(scope="module")
def said(forked) -> dict[str, dict[str, str]]:
    """What each flow gives without the plugin and with it; one process imports the stack for all of them."""
    program = "from tests.programs.test_flows import run; run()"
    return json.loads(forked(program, *OF_A_GROUP.values()).splitlines()[-1])


def test_each_group_has_a_flow():
    assert OF_A_GROUP.keys() == GROUPS.keys()


@pytest.mark.parametrize("name", OF_A_GROUP.values())
def test_a_program_fails_without_the_plugin_and_is_right_with_it(name, said):
    assert not flows.is_right(name, said[name]["unpatched"])
    assert flows.is_right(name, said[name]["patched"]), said[name]
