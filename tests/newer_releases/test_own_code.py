"""What our own code takes from a library: found wherever it stands in what an edit puts in."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from patches.engine.edits import Rewrite, SetAttribute
from tools.sources import own_code

HELPER = """
from library.top import at_the_top
from library import whole


def helper(value):
    return value.read_by_helper, at_the_top


class Kind:
    from_class = property(lambda self: self.read_in_property)

    def method(self):
        return whole.taken_from_module(self.read_in_method)

    @staticmethod
    def static(value):
        return value.read_in_static

    @classmethod
    def made(cls, value):
        return value.read_in_classmethod
"""
MADE = """
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from . import own_helper
from .own_helper import Kind, helper

if TYPE_CHECKING:
    from library.types import OnlyAType


def direct(layer: OnlyAType):
    from library.inside import called, mentioned

    called(1)
    return layer.read_here.read_after, getattr(layer, "read_by_name"), mentioned


def through_a_helper(layer):
    return helper(layer)


def through_a_module(layer):
    return own_helper.helper(layer)


def with_a_class(layer):
    return Kind().method()


def closure():
    def inner(layer):
        return helper(layer), layer.read_in_closure

    def outer(layer):
        return inner(layer)

    return outer


def second(layer, name):
    return layer.read_in_partial


partial = functools.partial(second, name="named_in_partial")


def names_a_target(layer):
    return find("library.modules:Class.method"), find("library.dotted.module")


def leads_to_itself(layer):
    return leads_to_itself(layer.read_in_a_circle)


def reads_a_dunder(layer):
    return layer.__class__.__name__


def in_a_table(layer):
    return TABLE["one"](layer)


TABLE = {"one": second, "others": [closure()]}


@functools.lru_cache
def decorated(layer):
    return layer.read_in_decorated


class Once:
    @functools.cached_property
    def value(self):
        return self.read_once

    def _delete(self):
        del self.deleted_here

    gone = property(None, None, _delete)


def with_a_cached_property(layer):
    return Once().value


def with_a_lambda(layer):
    return (lambda each: each.read_in_lambda)(layer)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator[Any]:
    """A module of ours, as the analysis sees it: in our package."""
    package = own_code._OURS
    folder = tmp_path_factory.mktemp("ours")
    (folder / "own_helper.py").write_text(textwrap.dedent(HELPER))
    (folder / "own_made.py").write_text(textwrap.dedent(MADE))
    for name, attributes in (("library", ("whole",)), ("library.top", ("at_the_top",))):
        module = sys.modules[name] = type(sys)(name)
        for attribute in attributes:
            setattr(module, attribute, object())
    sys.modules[package].__path__.append(str(folder))
    yield importlib.import_module(f"{package}.own_made")
    sys.modules[package].__path__.remove(str(folder))
    for name in ("library", "library.top", f"{package}.own_made", f"{package}.own_helper"):
        del sys.modules[name]


def uses(value: Any) -> own_code.Uses:
    return own_code.uses([SetAttribute("library.modules:Class.method", value=value)])


@pytest.fixture
def of(made) -> Callable[[str], own_code.Uses]:
    return lambda name: uses(getattr(made, name))


def test_what_is_imported_in_a_function_called_and_read(of):
    found = of("direct")
    assert {("library.inside", "called"), ("library.inside", "mentioned")} <= found.imported
    assert found.called >= {("library.inside", "called")} and ("library.inside", "mentioned") not in found.called
    assert {"read_here", "read_after", "read_by_name"} <= found.attributes
    assert "read_by_helper" not in found.attributes


@pytest.mark.parametrize("name", ["through_a_helper", "through_a_module"])
def test_a_helper_of_ours_is_followed(of, name):
    found = of(name)
    assert "read_by_helper" in found.attributes and ("library.top", "at_the_top") in found.imported


def test_a_class_of_ours_is_followed_with_its_methods(of):
    found = of("with_a_class")
    read = {"read_in_method", "read_in_property", "read_in_static", "read_in_classmethod"}
    assert read <= found.attributes
    assert {("library", "whole.taken_from_module")} <= found.imported & found.called


def test_closures_partials_tables_decorators_and_lambdas_are_followed(of, made):
    assert {"read_in_closure", "read_by_helper"} <= uses(made.closure()).attributes
    assert {"read_in_partial", "named_in_partial"} <= of("partial").attributes
    assert {"read_in_partial", "read_in_closure"} <= of("in_a_table").attributes
    assert "read_in_decorated" in of("decorated").attributes
    assert {"read_once", "deleted_here"} <= of("with_a_cached_property").attributes
    assert "read_in_lambda" in of("with_a_lambda").attributes


def test_a_circle_ends(of):
    assert "read_in_a_circle" in of("leads_to_itself").attributes


def test_what_a_string_names(of):
    assert {("library.modules", "Class.method"), ("library.dotted.module", "")} <= of("names_a_target").imported


def test_what_every_object_has_is_no_attribute_of_the_library(of):
    assert not of("reads_a_dunder").attributes


def test_a_rewrite_uses_what_it_adds_and_what_its_names_lead_to(made):
    edit = Rewrite(
        "library.modules:Class.method", "self.known(x)", "_ours(self.known(x), self.added, imported_there)",
        names={"_ours": made.through_a_helper},
    )  # fmt: skip
    found = own_code.uses([edit])
    assert {"added", "read_by_helper"} <= found.attributes and "known" not in found.attributes
    assert ("library.modules", "imported_there") in found.imported


def test_what_makes_a_value_is_followed(made):
    edit = SetAttribute("library.modules:Class.method", make=made.through_a_helper)
    assert "read_by_helper" in own_code.uses([edit]).attributes
