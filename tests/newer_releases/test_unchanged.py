"""A newer release whose source is that of a tested one is repaired as that is, without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from patches.engine import gate
from tests.newer_releases import copies, programs

pytestmark = copies.NEEDS_NEWEST
STEP = """
said = quantized_programs.train_lora(quantized_programs.llama_4bit)
"""


@pytest.fixture(scope="module")
def newer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("newer")
    for package, version in copies.NUMBERS.items():
        copies.copy(folder, package, version)
    return folder


@pytest.fixture(scope="module")
def there(newer, repaired) -> programs.Said:
    return programs.flow(STEP, newer, repaired)


@pytest.fixture(scope="module")
def here(tmp_path_factory, repaired) -> programs.Said:
    return programs.flow(STEP, tmp_path_factory.mktemp("empty"), repaired)


def test_the_same_patches_are_applied(here, there):
    assert {name: status for name, (status, _) in there.results.items()} == {
        name: status for name, (status, _) in here.results.items()
    }
    assert len(there.ids("applied")) > 50 and not there.ids("untested")


def test_a_step_of_a_4bit_lora_has_the_same_bits(here, there):
    assert here.said == there.said


def test_no_line_is_a_warning(here, there):
    assert not here.warnings and not there.warnings
    assert [text.partition(". All")[0] for level, text in there.lines if level == "INFO"]


def test_the_reason_names_both_releases(there):
    reasons = {package: set() for package in copies.NUMBERS}
    for name in there.ids("applied"):
        for package in reasons:
            if name.startswith(f"{package}-"):
                reasons[package].add(there.results[name][1])
    for package, found in reasons.items():
        version, installed = copies.NUMBERS[package], gate.recorded_version(package)
        assert all(f"{package} {version} is newer than " in reason for reason in found), found
        assert all("; the source is that of " in reason for reason in found), found
        assert any(reason.endswith(f"; the source is that of {installed}") for reason in found), found


def test_nothing_need_be_imported_to_know(newer, there):
    verdicts = programs.verdicts(newer)
    applied = {key.partition(":")[0] for key, (status, _) in verdicts.items() if status == "available"}
    assert applied == there.ids("applied")
