"""Input that means no patch gets a line that says what to give instead."""

from __future__ import annotations

import importlib.metadata

import pytest

from patches import autoload
from patches.command_line import main


@pytest.mark.parametrize("text", ["", "  ", ".", "e"])
def test_explain_without_a_word_is_bad_usage(text, capsys):
    assert main(["explain", text]) == 2
    assert "give the id of a patch, or an error message in quotes" in capsys.readouterr().err


def test_explain_names_the_nearest_id_and_takes_a_part_of_one(capsys):
    assert main(["explain", "bitsandbytes-cpu-repak"]) == 2
    assert "the nearest: bitsandbytes-cpu-repack" in capsys.readouterr().err
    assert main(["explain", "peft-unmerg"]) == 0
    assert capsys.readouterr().out.startswith("peft-unmerge\n")


def test_the_nearest_group_is_named_too(monkeypatch, caplog):
    monkeypatch.setenv("PATCHES_DISABLE", "trian")
    autoload.read_settings()
    assert "the nearest: train" in caplog.text


def test_diff_says_why_a_named_patch_changes_nothing(monkeypatch, capsys):
    monkeypatch.setenv("PATCHES_DISABLE", "bitsandbytes-int8-copies")
    assert main(["diff", "bitsandbytes-int8-copies"]) == 0
    said = capsys.readouterr()
    assert not said.out and "bitsandbytes-int8-copies changes nothing here, because it is disabled" in said.err


def test_explain_finds_a_message_that_a_page_quotes(capsys):
    assert main(["explain", "Only Tensors of floating point and complex dtype can require gradients"]) == 0
    assert {"peft-lora-options-ignored", "peft-reads-packed-weights"} <= set(capsys.readouterr().out.split())
    assert main(["explain", "Please initialize MiCA under float32, float16, or bfloat16."]) == 0
    assert capsys.readouterr().out.startswith("peft-lora-options-ignored\n")


def test_the_version_is_that_of_the_distribution(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"bnb-patches {importlib.metadata.version('bnb-patches')}\n"
