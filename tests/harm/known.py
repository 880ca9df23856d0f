"""The programs that the patches of today fail, and the fault that each shows. There are none.

C1 to C17 were those of FINDINGS, section C; N1 to N8 were found by the catalogue. All are repaired, and the programs
that showed them stay. A fault that is found later, and not repaired at once, is put here.

An entry of :data:`KNOWN` is the id of a program, with its kind of layer or without (then all kinds), as pytest and
``python -m tests.harm`` print it, and the fault, told at :data:`FOUND`; ``" on "`` names the releases where it shows,
as PEP 508 requirements: ``"copies.a_layer_pickled[int8]": "N5 on bitsandbytes<0.47"``. ``@avx512bf16`` ends the id of
a program on a processor that repacks 4-bit weights: it is run by ``test_packed``. ``sequences.OPERATION[KIND]`` and
``aot_cache.after_CACHE[KIND]`` are tests of those two files.

How an entry goes: each is a strict xfail, so a program that no longer fails makes the suite fail (``XPASS(strict)``).
Then delete its line here, and nothing else; where it still fails on some releases, or with some kinds of layer, put
what is left in its place. A fault of :data:`FOUND` whose last entry goes, goes too. An operation that leaves the list
takes part in the random sequences from then on. A name that is no program's, and a fault that no entry has, fail
``test_known_names_programs``. No entry is added for a new patch: its harm is repaired instead.
"""

from __future__ import annotations

import pytest

from patches.engine import gate

FOUND: dict[str, str] = {}

KNOWN: dict[str, str] = {}


def fault_of(name: str) -> str:
    """The fault of an entry, without its releases."""
    return KNOWN[name].partition(" on ")[0]


def marks(*names: str) -> list[pytest.MarkDecorator]:
    """The mark of the program that goes by these names, if it is known to fail on this stack."""
    for name in names:
        fault, _, when = KNOWN.get(name, "").partition(" on ")
        if fault and (not when or gate.satisfied(when)):
            reason = f"{fault}: {FOUND[fault]}" if fault in FOUND else fault
            return [pytest.mark.xfail(reason=reason, strict=True)]
    return []
