"""Digests of definitions: what changes them, what does not, and that every Python gives the same."""

from __future__ import annotations

import pytest

from patches.engine.definitions import ABSENT, digests

SOURCE = '''
"""A module."""
import dataclasses
try:
    from fast import product
except ImportError:
    def product(a, b):
        return a * b

LIMIT: int = 3
lower, upper = 0, LIMIT

@dataclasses.dataclass(frozen=True)
class State:
    """What a layer keeps."""
    shape: tuple[int, ...] = ()
    kind = "nf4"

    def size(self, *, scale: float = 1.0) -> int:
        """Count the elements."""
        # in a loop
        total = 1
        for each in self.shape:
            total *= each
        return f"{total:>{LIMIT}} of {self.kind!r}" if (found := total) > 1e-3 else found

    @property
    def dtype(self):
        match self.kind:
            case "nf4" | "fp4":
                return 'uint8'
            case [first, *_] if first:
                return first
        async def later():
            async with self as it:
                yield {**it, "text": "a" f"b{it}" "c"}, *it, it[1:2, ...], lambda x, /, y=1, *z: (x, -1j)
        return later
'''
NAMES = ("product", "LIMIT", "upper", "State", "State.shape", "State.size", "State.dtype", "State.gone", "gone.size")


def digest(name: str, text: str = SOURCE) -> str:
    return digests(text, [name])[name]


def test_every_python_gives_the_same():
    assert digests(SOURCE, NAMES) == {
        "product": "05c4348e9163dc89",
        "LIMIT": "0c226e4be6285710",
        "upper": "2ce3bd8b0ad2b20c",
        "State": "c379f8e7ac2477fa",
        "State.shape": "1f2d40350a965d6a",
        "State.size": "0be889311a35073d",
        "State.dtype": "03847fd520462de6",
        "State.gone": "absent",
        "gone.size": "absent",
    }


@pytest.mark.parametrize("name", ["State.gone", "gone.size"])
def test_what_is_not_there_is_absent(name):
    assert digest(name) == ABSENT


@pytest.mark.parametrize("old, new", [
    ("# in a loop", "# for each of them"),
    ('"""Count the elements."""', '"""Return how many elements there are."""'),
    ('        """Count the elements."""\n', ""),
    ("total = 1\n", "total = (\n            1)\n"),
    ("return 'uint8'", 'return "uint8"'),
    ('"a" f"b{it}" "c"', 'f"ab{it}c"'),
    ("\nLIMIT", "\n\n\n\nLIMIT"),
])  # fmt: skip
def test_what_is_the_same_to_a_program(old, new):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert digests(changed, NAMES) == digests(SOURCE, NAMES)


@pytest.mark.parametrize("old, new, names", [
    ("a * b", "a @ b", {"product"}),
    ("LIMIT: int = 3", "LIMIT: int = 4", {"LIMIT"}),
    ("lower, upper = 0", "lower, upper = 1", {"upper"}),
    ("total *= each", "total += each", {"State.size"}),
    ("scale: float = 1.0", "scale: float = 2.0", {"State.size"}),
    ("{total:>{LIMIT}}", "{total:<{LIMIT}}", {"State.size"}),
    ("    @property\n", "", {"State.dtype"}),
    ("it[1:2, ...]", "it[1:2]", {"State.dtype"}),
    ("frozen=True", "frozen=False", {"State"}),
    ("shape: tuple[int, ...] = ()", "shape: tuple[int, ...] = (1,)", {"State", "State.shape"}),
    ("class State:", "class State(tuple):", {"State"}),
    ("from fast import product\nexcept ImportError:\n    def product(a, b):", "def product(b, a):\n        pass\nexcept ImportError:\n    def product(a, b):", {"product"}),
])  # fmt: skip
def test_what_changes_a_digest_changes_no_other(old, new, names):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    before, after = digests(SOURCE, NAMES), digests(changed, NAMES)
    assert {name for name in NAMES if before[name] != after[name]} == names


def test_a_method_that_comes_to_a_class_is_no_change_of_the_class():
    changed = SOURCE.replace("    @property", "    def more(self):\n        pass\n\n    @property")
    assert digests(changed, NAMES) == digests(SOURCE, NAMES)


def test_the_files_encoding_is_read():
    text = "# -*- coding: latin-1 -*-\ndef f():\n    return '\xe4'\n"
    assert digests(text.encode("latin-1"), ["f"]) == digests(text.replace("latin-1", "utf-8").encode(), ["f"])


def test_a_file_that_cannot_be_read_is_an_error():
    with pytest.raises(SyntaxError):
        digests("def f(:", ["f"])
