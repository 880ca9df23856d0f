"""What `make stacks` has found (``docs/stacks.json``) is what the documentation says: nothing is worse, and the rest has a reason."""

from __future__ import annotations

import re

import pytest

from tests.stacks.flows import is_right
from tools import stacks as tool
from tools.docs import stacks

RUNS = [(name, torch, found) for name, runs in stacks.results().items() for torch, found in runs.items()]
PAGE = (tool.ROOT / "docs" / "releases.md").read_text("utf-8")
each_run = pytest.mark.parametrize(
    ("name", "torch", "found"), RUNS, ids=[f"{name}, {torch}" for name, torch, _ in RUNS]
)


@each_run
def test_no_reproducer_is_wrong_and_no_patch_is_a_conflict(name, torch, found):
    bad = [row for row in found["verify"] if row["verdict"] == "wrong" or "conflict" in row["reason"]]
    assert not bad


@each_run
def test_what_the_plugin_does_not_repair_has_a_reason(name, torch, found):
    said = {flow: each["patched"] for flow, each in found.get("flows", {}).items()}
    left = {flow: words for flow, words in said.items() if not is_right(flow, words) and not stacks.why(flow, words)}
    assert not left


def test_every_reason_is_that_of_a_flow():
    given = {
        stacks.why(flow, each["patched"])
        for _, _, found in RUNS
        for flow, each in found.get("flows", {}).items()
        if not is_right(flow, each["patched"])
    }
    assert {reason for _, reason in stacks.REASONS} <= given


@each_run
def test_no_flow_is_right_without_the_plugin_only(name, torch, found):
    flows = found.get("flows", {}).items()
    assert not [
        flow for flow, each in flows if is_right(flow, each["unpatched"]) and not is_right(flow, each["patched"])
    ]


@each_run
def test_what_compiles_without_the_plugin_compiles_with_it(name, torch, found):
    """Into more graphs than one, where Dynamo of that torch does not trace the rest."""
    flows = {flow: each for flow, each in found.get("flows", {}).items() if ": graphs" in flow}
    assert not [flow for flow, each in flows.items() if each["unpatched"][0].isdigit() > each["patched"][0].isdigit()]


@each_run
def test_it_was_run_on_what_the_table_declares(name, torch, found):
    named = (*tool.PACKAGES, "python")
    declared = {package: release for package, release in tool.declared()[name].items() if package in named}
    assert found["versions"] == {**declared, "torch": torch}


def test_the_readme_names_the_torches_that_were_run():
    (said,) = re.findall(r"\(torch ([^)]+), Python", (tool.ROOT / "README.md").read_text("utf-8"))
    named, measured = set(re.findall(r"\d\.\d+", said)), {tool.series(torch) for _, torch, _ in RUNS}
    by_hand = named - measured
    assert measured <= named
    assert all(f"torch {torch}." in PAGE for torch in by_hand)


@pytest.mark.parametrize("package", ["bitsandbytes", "transformers", "peft", "accelerate"])
def test_the_page_names_the_oldest_and_the_newest_of_the_table(package):
    (row,) = re.findall(rf"^\| {package} \| ([\d.]+).* \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert row == tuple(tool.declared()[stack][package] for stack in ("oldest", "newest"))
