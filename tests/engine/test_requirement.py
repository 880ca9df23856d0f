"""The part of PEP 508 that patches use means what packaging says it means."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from patches import REGISTRY
from patches.engine.requirement import parse

VERSIONS = ("0.46.0", "0.46.1", "0.47.0", "0.47.1", "0.50.0", "0.50.2", "0.51", "1", "1.0.0", "5.23.0", "2026.9.13",
            "0.50.0+cu128", "0.47.0+cpu.1", "0.50.0rc1", "0.50.0.post1", "0.49.9")  # fmt: skip
TEXTS = sorted({text for patch in REGISTRY.patches.values() for text in patch.requires}
               | {text for patch in REGISTRY.patches.values() for edit in patch.edits
                  for text in edit.when.split(" and ") if text}
               | {"a", " a >= 0.47 , < 0.50 ", "a==0.47.0", "a!=0.50.0", "A.b-c_d<1"})  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_it_says_what_packaging_says(text):
    ours, theirs = parse(text), Requirement(text)
    assert ours.name == theirs.name
    assert {(sign, str(bound)) for sign, bound in ours.bounds} == {(s.operator, s.version) for s in theirs.specifier}
    for version in VERSIONS:
        if "rc" in version:  # packaging leaves pre-releases of a bound out on both sides
            continue
        assert ours.contains(version) == theirs.specifier.contains(version, prereleases=True), version


@pytest.mark.parametrize("version", ["0.50.0.dev0", "0.50.0.dev0+g1234"])
def test_a_source_build_lies_on_both_sides_of_its_release(version):
    assert parse("a>=0.50").contains(version) and parse("a<0.50").contains(version)
    assert parse("a>=0.50,<0.51").contains(version) and parse("a==0.50.0").contains(version)
    assert not parse("a>=0.51").contains(version) and not parse("a<0.49").contains(version)


@pytest.mark.parametrize("version", ["2.6.0a0+ecf3bae40a.nv25.01", "2.6.0a0+df5bbc09d1.nv24.12", "2.6.0b1"])
def test_a_build_for_a_container_lies_on_both_sides_too(version):
    assert parse("torch>=2.6").contains(version) and parse("torch<2.6").contains(version)
    assert not parse("torch>=2.7").contains(version) and not parse("torch<2.5").contains(version)


@pytest.mark.parametrize("version", ["2.6.0rc1", "2.6.0rc3+cu124"])
def test_a_release_candidate_counts_as_its_release(version):
    assert parse("torch>=2.6").contains(version) and parse("torch==2.6.0").contains(version)
    assert not parse("torch<2.6").contains(version) and not parse("torch!=2.6.0").contains(version)


def test_a_version_that_is_none_meets_every_bound_and_the_source_decides():
    assert parse("a>=0").contains("not a version") and parse("a<1").contains("")


@pytest.mark.parametrize(
    "text", ["", ">=1", "a>1", "a~=1.0", "a>=1,", "a>=", "a>=one", "a==1.*", "a[extra]>=1", "a>=1; python_version>'3'",
             "a @ https://example.org/a.whl", "a b"],
)  # fmt: skip
def test_what_is_more_or_less_than_that_is_an_error(text):
    with pytest.raises(ValueError, match="is not a requirement: write a package and bounds"):
        parse(text)
