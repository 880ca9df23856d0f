"""``patches.inspect()`` one line in the log and one in the report say what of an offloaded model lies where, and what each use of it brings."""

from __future__ import annotations

import gc
import logging

import pytest

import patches

from .inspected import IDS, dispatched, llama, load, saved

NORMS = 2 * 64 * 4


def packed(bits):
    """Numbers of a decoder layer: q and o of 64 to 64, k and v to 32, three of an MLP of 128."""
    numbers = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    rows = 2 * 64 + 2 * 32 + 2 * 128 + 64
    return numbers // 2 if bits == 4 else numbers + 4 * rows


@pytest.mark.parametrize("bits", [4, 8])
def test_what_lies_where(bits):
    with patches.applied("bitsandbytes-params4bit-meta"):
        found = patches.inspect(dispatched(load(bits)))
    here, disk = found.facts.places
    assert (here.where, here.layers, here.quantized, here.brings) == ("cpu", 12, 7, {})
    assert (disk.where, disk.layers, disk.quantized) == ("disk", 9, 7)
    assert disk.brings == {"cpu": packed(bits) + NORMS}
    assert "a forward brings" in str(found)
    whole = sum(line.bytes for line in found.facts.layers)
    assert here.bytes + disk.bytes == whole


def test_nothing_is_said_of_a_model_that_is_whole():
    assert patches.inspect(load(4)).facts.places == ()
    assert patches.inspect(llama()).facts.places == ()


def test_a_line_in_the_log_when_a_model_is_loaded_so_and_in_the_report_while_it_lives(caplog, tmp_path):
    import transformers

    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with patches.applied(), caplog.at_level(logging.INFO, "bnb_patches"):
        caplog.clear()
        model = transformers.LlamaForCausalLM.from_pretrained(
            saved("llama"), quantization_config=how, offload_folder=tmp_path,
            device_map={"": "cpu", "model.layers.1": "disk"},
        )  # fmt: skip
        model(IDS)
        (note,) = [note for note in patches.report().notes if "LlamaForCausalLM" in note]
        del model
        gc.collect()
        assert not [note for note in patches.report().notes if "LlamaForCausalLM" in note]
    lines = [record for record in caplog.records if "is quantized and placed on" in record.message]
    assert [record.levelno for record in lines] == [logging.INFO]
    assert lines[0].message == note
    assert (
        "disk (9 layers, 18.9 kB)" in lines[0].message
        and "copies 18.9 kB from the CPU or the disk to cpu" in lines[0].message
    )
