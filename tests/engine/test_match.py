"""Finding what an edit names: wherever it stands, and no place twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from patches.engine import match
from patches.engine.edits import Rewrite
from patches.engine.function_source import Source, read_source


def source_of(folder: Path, text: str) -> Source:
    """That of the function ``f``, which is all of ``text``."""
    (folder / "places.py").write_text(text)
    code = compile(text, str(folder / "places.py"), "exec")
    space: dict = {"__name__": "places"}
    exec(code, space)
    return read_source(space["f"], space["f"].__code__)


def test_edits_that_have_only_an_operator_in_common_do_not_overlap(tmp_path):
    source = source_of(tmp_path, "def f(a, b):\n    c = a + b\n    return c * (b + a)\n")
    edits = [Rewrite("m:f", "a + b", "a"), Rewrite("m:f", "b + a", "b")]
    assert len(match.matches(source, source.parse()[1], edits)) == 2  # the parser makes one Add for both


def test_an_edit_within_an_argument_overlaps_one_of_the_call(tmp_path):
    source = source_of(tmp_path, "def f(a):\n    return g(0, [a])\n")
    edits = [Rewrite("m:f", "g(0, [a])", "a"), Rewrite("m:f", "a", "0")]
    for both in (edits, edits[::-1]):
        with pytest.raises(match.Conflict, match="overlaps"):
            match.matches(source, source.parse()[1], both)


EVERYWHERE = '''
def f(a, b):
    first = 0
    second(a)

    @at_1_
    def inner(x=at_2_) -> at_3_:
        return at_4_

    @at_5_(
        a
    )
    class Inner(at_6_):
        value: at_7_ = at_8_

    text = f"""
        {at_9_}
        {a +
            at_10_} {b:{at_11_}}
    """
    try:
        a = at_12_
    except at_13_:
        at_14_
    finally:
        with a, \\
            at_15_ as b:
            del b[at_16_]
    match a:
        case b if at_17_:
            at_18_
    if a:
        raise ValueError from at_19_
    elif at_20_:
        pass
    else:
        while at_21_: at_22_
    for i in at_23_:
        for j in i:
            assert at_24_, at_25_
        else:
            a[at_26_] += at_27_
    return lambda y=at_28_: [at_29_ for z in at_30_]
'''


def test_it_is_found_wherever_it_stands(tmp_path):
    source = source_of(tmp_path, EVERYWHERE)
    assert [match.occurrences(source, f"at_{number}_") for number in range(1, 31)] == [1] * 30
    assert match.occurrences(source, "first = 0\nsecond(a)") == 1, "the longest name is in the second statement"
    assert match.occurrences(source, "a") == 8 and match.occurrences(source, "0") == 1
    assert match.occurrences(source, "absent") == 0
