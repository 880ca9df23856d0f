"""What a user sees leads to its patch: on the site, in its box, and by `explain`."""

from __future__ import annotations

import ast
import functools
import html
import importlib.metadata
import json
import mmap
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from patches import REGISTRY
from patches.command_line import explain
from patches.symptoms import GROUPS, WORDS, common_parts
from tools.docs import DOCS, symptoms

from .test_docs import FIGURES, sources

MESSAGES = symptoms.messages()


def test_every_patch_has_its_symptoms():
    for patch in REGISTRY.patches.values():
        assert patch.groups and set(patch.groups) <= GROUPS.keys(), patch.id
        assert patch.messages or patch.silent, f"{patch.id}: the messages without it, if there are any"
    assert set(GROUPS) == {group for patch in REGISTRY.patches.values() for group in patch.groups}


@pytest.mark.parametrize(("pasted", "patch_id"), [
    ("expected device meta", "peft-adapters-on-meta"),
    ("You can't train a model that has been loaded in 8-bit", "accelerate-refuses-offloaded-training"),
    ("Non-nullified side effect", "bitsandbytes-matmul4bit-dtype-write"),
    ("'NoneType' object has no attribute 'unsqueeze'", "bitsandbytes-int8-backward-live-state"),
    ("Cannot copy out of meta tensor; no data!", "bitsandbytes-params4bit-meta"),
])  # fmt: skip
def test_what_a_user_pastes_leads_to_the_patch(pasted, patch_id):
    found = {i for message, ids in MESSAGES if pasted in message.text for i in ids}
    assert patch_id in found
    assert f'href="patches/{patch_id}.html"' in sources()["generated/symptoms.md"]


def halves(text):
    words = text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


SEARCHED = [
    *((half, "transformers-refuses-offloaded-checkpoint") for half in halves(
        "ValueError: If you want to dispatch the model on the CPU or the disk while keeping these modules in 32-bit, "
        "you need to set `llm_int8_enable_fp32_cpu_offload=True` and pass a custom `device_map` to `from_pretrained`."
    )),
    *((half, "transformers-device-map-refused") for half in halves(
        "Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the quantized model."
    )),
    ("recompile", "bitsandbytes-matmul4bit-aot-cache"),
    ("torch.compile: too many recompilations", "bitsandbytes-int8-cold-state"),
    ("graph break", "transformers-input-grads-hook"),
    ("OOM", "transformers-checkpointing-in-eval"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "accelerate-left-on-device"),
    ("my loss is nan after a step", "bitsandbytes-params4bit-cast"),
]  # fmt: skip


@pytest.mark.parametrize(("pasted", "patch_id"), SEARCHED)
def test_words_that_people_search_for_lead_to_patches(pasted, patch_id):
    assert patch_id in explain.matching(pasted, REGISTRY.patches)


@pytest.mark.skipif(not shutil.which("node"), reason="the box of the site is JavaScript, and there is no node")
def test_the_box_of_the_site_finds_the_same():
    """`find_your_defect.js` as a browser runs it, over the rows of the page."""
    rows = re.findall(r'<tr data-(\w+)="(.*?)"><td>(.*?)</td><td>(.*?)</td></tr>', sources()["generated/symptoms.md"])
    shown = [
        {
            "key": key,
            "data": html.unescape(data),
            "cells": [html.unescape(re.sub("<.*?>", " ", c)).strip() for c in cells],
        }
        for key, data, *cells in rows
    ]
    assert len(shown) == len(MESSAGES) + len(WORDS)
    given = json.dumps({"rows": shown, "pasted": [pasted for pasted, _ in SEARCHED]})
    program = BROWSER + (DOCS / "_static" / "find_your_defect.js").read_text("utf-8") + ASK
    done = subprocess.run(["node", "-e", program], input=given, capture_output=True, text=True, check=True)
    for (pasted, patch_id), found in zip(SEARCHED, json.loads(done.stdout), strict=True):
        assert 0 < len(found) < len(shown) / 2, pasted
        assert any(patch_id in shown[row]["cells"][1].split() for row in found), (pasted, patch_id)


BROWSER = """
const { rows, pasted } = JSON.parse(require("fs").readFileSync(0));
const field = { value: "", addEventListener: (_, call) => { field.input = call; } };
const shown = rows.map(({ key, data, cells }) => ({
  dataset: { [key]: data }, cells: cells.map((textContent) => ({ textContent })), textContent: cells.join(""), hidden: false,
}));
const document = {
  addEventListener: (_, call) => call(),
  getElementById: (id) => (id === "defect" ? field : {}),
  querySelectorAll: () => shown,
};
"""
ASK = """
console.log(JSON.stringify(pasted.map((text) => {
  field.value = text;
  field.input();
  return shown.flatMap((row, number) => (row.hidden ? [] : [number]));
})));
"""


def test_the_search_of_the_site_finds_the_pages_of_patches_by_these_words():
    """It looks for words of a page, and knows nothing of `Patch.words`."""
    for words, ids in symptoms.words().items():
        for patch_id in ids:
            assert words in sources()[f"patches/{patch_id}.md"], (patch_id, words)


def test_words_of_patches_are_those_that_are_known():
    assert {text for patch in REGISTRY.patches.values() for text in patch.words} == WORDS.keys()


@pytest.mark.parametrize(("message", "ids"), MESSAGES, ids=[message.text[:60] for message, _ in MESSAGES])
def test_a_message_stands_where_it_is_said_to(message, ids):
    """In the source or the compiled library that says it, or in what the reproducers of its patches found."""
    holds = message.holds or common_parts(message)
    assert all(part in message.text for part in common_parts(message)), "the parts are parts of the text"
    if message.where == "figure":
        figures = (figure for name, figure in FIGURES.items() if name.partition("/")[0] in ids)
        said = " ".join(figure["unpatched"] for figure in figures)
        assert all(part in said for part in holds)
        return
    text = source(message.where)
    assert not [part for part in holds if text.find(part.encode()) < 0], message.where


@functools.cache
def source(file: str) -> bytes | mmap.mmap:
    """A file of what is installed; of Python also its strings, as they are at run time."""
    package = file.partition("/")[0]
    path = Path(str(importlib.metadata.distribution(package).locate_file(file)))
    if path.suffix != ".py":
        with path.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    text = path.read_text("utf-8")
    constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return "\n".join([text, *(value for value in constants if isinstance(value, str))]).encode()
