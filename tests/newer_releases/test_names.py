"""Where a name of a library is defined, found through everything that imports it on the way."""

from __future__ import annotations

import pytest

from tools.sources.names import Names

FILES = {
    "lib": """
        from typing import TYPE_CHECKING
        from . import deep as below
        from .star import *
        from .first import Thing as Renamed, function
        import lib.deep.inner
        if TYPE_CHECKING:
            from .lazy import Late
        else:
            __getattr__ = make_getter()
        LIMIT = 3
        try:
            from .fast import quick
        except ImportError:
            from .first import quick
    """,
    "lib.star": "from .first import Thing\ndef starred(): ...\n",
    "lib.first": """
        class Thing:
            field = 1
            def method(self): ...
            class Inner:
                def deeper(self): ...
        def function(): ...
        def quick(): ...
        if True:
            def conditional(): ...
    """,
    "lib.lazy": "from .first import Thing as Late\n",
    "lib.deep": "from ..first import Thing\nfrom . import inner\n",
    "lib.deep.inner": "from lib.first import function as again\nclass Own: ...\n",
    "lib.round": "from .about import turn\n",
    "lib.about": "from .round import turn\n",
}
PACKAGES = {"lib", "lib.deep"}


def text(module: str) -> str | None:
    import textwrap

    name = module.removesuffix(".__init__")
    if name != module and name not in PACKAGES:
        return None
    return textwrap.dedent(FILES[name]) if name in FILES else None


@pytest.fixture
def names() -> Names:
    return Names(text)


@pytest.mark.parametrize(("module", "path", "expected"), [
    ("lib.first", "Thing", "lib.first:Thing"),
    ("lib.first", "Thing.method", "lib.first:Thing.method"),
    ("lib.first", "Thing.Inner.deeper", "lib.first:Thing.Inner.deeper"),
    ("lib.first", "conditional", "lib.first:conditional"),
    ("lib", "LIMIT", "lib:LIMIT"),
    ("lib", "Renamed.method", "lib.first:Thing.method"),
    ("lib", "starred", "lib.star:starred"),
    ("lib", "Thing", "lib.first:Thing"),
    ("lib", "Late", "lib.first:Thing"),
    ("lib", "quick", "lib.first:quick"),
    ("lib", "below.Thing", "lib.first:Thing"),
    ("lib", "first.function", "lib.first:function"),
    ("lib", "deep.inner.Own", "lib.deep.inner:Own"),
    ("lib", "deep.inner.again", "lib.first:function"),
    ("lib.deep", "inner.Own", "lib.deep.inner:Own"),
    ("lib", "deep.inner", None),
    ("lib", "", None),
    ("lib", "nothing", None),
    ("lib.round", "turn", None),
    ("none", "anything", None),
])  # fmt: skip
def test_a_name_leads_to_its_definition(names, module, path, expected):
    assert names.resolve(module, path) == expected


def test_members_are_those_of_a_module_and_of_its_classes(names):
    found = dict(names.members("lib.first"))
    assert found == {
        "field": "lib.first:Thing.field", "method": "lib.first:Thing.method", "function": "lib.first:function",
        "quick": "lib.first:quick", "conditional": "lib.first:conditional",
    }  # fmt: skip
    assert not list(names.members("none"))
