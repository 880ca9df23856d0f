"""The table of sources that is shipped: it has all that the patches rest on, and the installed releases are as it says."""

from __future__ import annotations

import importlib.util
import re
from collections import defaultdict

import pytest

from patches import REGISTRY
from patches.engine import definitions, gate
from patches.newer_releases.source_table import _shipped, is_in, source_file
from tools.sources.__main__ import TABLE, text
from tools.sources.gathered import edited, is_for

PARTS = {part.key: part for patch in REGISTRY.patches.values() for part in patch.parts}
REPAIRED = ("bitsandbytes", "transformers", "peft", "accelerate", "diffusers")
INSTALLED = [package for package in REPAIRED if importlib.util.find_spec(package)]
SHIPPED = _shipped()


def releases(package: str) -> list[str]:
    return SHIPPED["releases"][package].split()


def test_each_part_of_each_patch_has_a_row_and_no_row_is_left_over():
    assert SHIPPED["rests_on"].keys() == PARTS.keys()


def test_what_has_digests_is_each_edit_and_each_name_that_a_patch_rests_on():
    named = {edit.target for part in PARTS.values() for edit in part.edits}
    named |= {name for names in SHIPPED["rests_on"].values() for name in names}
    assert named == {name for found in SHIPPED["digests"].values() for name in found}


def test_each_package_that_is_edited_has_releases():
    edited_in = {package for part in PARTS.values() for package in (part.package, *part.neighbours)}
    assert edited_in == SHIPPED["releases"].keys() == SHIPPED["digests"].keys()


def test_each_release_that_a_patch_was_tested_up_to_is_in_it():
    assert not {key for key, part in PARTS.items() if part.tested_up_to not in releases(part.package)}


def test_each_patch_rests_on_something_in_the_newest_release_that_it_is_for():
    bare = set()
    for key, part in PARTS.items():
        newest = [release for release in releases(part.package) if is_for(part, release)][-1]
        names = {*edited(part), *(name for name in SHIPPED["rests_on"][key] if is_in(part.package, name))}
        digests = [digest for name in names for digest, known in SHIPPED["digests"][part.package][name].items()
                   if newest in known.split()]  # fmt: skip
        if not digests:
            bare.add(key)
    assert not bare, "a release would be known by nothing"


@pytest.mark.parametrize("package", INSTALLED)
def test_the_installed_release_has_the_digests_of_the_table(package):
    release = str(gate.recorded_version(package))
    if release not in releases(package):
        pytest.skip(f"{package} {release} is none of the releases that the table is made from")
    by_module = defaultdict(list)
    for name in SHIPPED["digests"][package]:
        module, _, path = name.partition(":")
        by_module[module].append(path)
    differ = {}
    for module, names in by_module.items():
        file = source_file(module)
        here = definitions.digests(file.read_bytes(), names) if file else dict.fromkeys(names, definitions.ABSENT)
        for name, digest in here.items():
            known = SHIPPED["digests"][package][f"{module}:{name}"]
            there = next((each for each, having in known.items() if release in having.split()), definitions.ABSENT)
            if digest != there:
                differ[f"{module}:{name}"] = there, digest
    assert not differ, "`make sources` writes the table anew"


def test_it_is_written_as_make_sources_writes_it():
    assert text(SHIPPED) == TABLE.read_text("utf-8")


def test_a_digest_is_64_bits_and_of_releases_that_are_listed():
    for package, found in SHIPPED["digests"].items():
        for name, each in found.items():
            having = [release for some in each.values() for release in some.split()]
            assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in each), name
            assert len(having) == len(set(having)) and set(having) <= set(releases(package)), name
