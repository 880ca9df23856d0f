"""Comparing files with a table: small packages and a table of our own."""

from __future__ import annotations

import compileall
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from patches.engine import definitions
from patches.engine.edits import Rewrite, SetAttribute
from patches.newer_releases.source_table import SourceTable, of_installed, source_file
from tests.engine.conftest import patch

SOURCE = "class Layer:\n    def forward(self):\n        return 1\n\n\ndef helper():\n    return 2\n"
EDITED, HELPER, ADDED = "small.layers:Layer.forward", "small.layers:helper", "small.layers:Layer.added"


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """The folder of the package ``small``, with a module ``layers``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "layers.py").write_text(SOURCE)
    importlib.invalidate_caches()
    sys.modules.pop("small", None)
    return folder


def part(*edits, requires: str = "small>=1"):
    return patch("small-a", *edits, requires=(requires,), tested_up_to="1.0").parts[0]


def table(*names: str, source: str = SOURCE, **other: str) -> SourceTable:
    """Of release 1.0 with ``source``; others by their numbers, as in ``v0_9=...``."""
    sources = {"1.0": source, **{release[1:].replace("_", "."): text for release, text in other.items()}}
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for release, text in sources.items():
        for name, digest in definitions.digests(text, [name.partition(":")[2] for name in names]).items():
            if digest != definitions.ABSENT:
                row = found[f"small.layers:{name}"]
                row[digest] = f"{row[digest]} {release}" if digest in row else release
    rows = {"releases": {"small": " ".join(sources)}, "rests_on": {"small-a": [HELPER]}, "digests": {"small": found}}
    return SourceTable(of_installed(read), lambda: {"failed": {}, **rows})


def read(file: str, wanted: Sequence[str]) -> dict[str, str]:
    return definitions.digests(Path(file).read_bytes(), wanted)


REWRITE = Rewrite(EDITED, "1", "3")
LATER = SOURCE.replace("return 1", "return 11")


def test_the_same_source_is_known(small):
    found = table(EDITED, HELPER).compare(part(REWRITE), "2.0")
    assert found.is_known and found.release == "1.0"


@pytest.mark.parametrize("old, new, name", [("return 1", "return 9", EDITED), ("return 2", "return 9", HELPER)])
def test_what_differs_is_named(small, old, new, name):
    (small / "layers.py").write_text(SOURCE.replace(old, new))
    found = table(EDITED, HELPER).compare(part(REWRITE), "2.0")
    assert not found.is_known and found.different == (name,)


def test_all_must_be_of_one_release(small):
    """Of two functions each is that of a tested release, and of another one."""
    (small / "layers.py").write_text(LATER)
    found = table(EDITED, HELPER, v0_9=LATER.replace("return 2", "return 22")).compare(part(REWRITE), "2.0")
    assert not found.is_known and (found.release, found.different) == ("1.0", (EDITED,))


def test_an_older_release_will_do_and_the_newest_is_named(small):
    (small / "layers.py").write_text(LATER)
    assert (
        table(EDITED, HELPER, v0_9=LATER, v0_8=LATER).compare(part(REWRITE, requires="small>=0.5"), "2.0").release
        == "0.9"
    )


def test_a_release_outside_of_the_range_of_the_patch_will_not_do(small):
    (small / "layers.py").write_text(LATER)
    assert not table(EDITED, HELPER, v0_9=LATER).compare(part(REWRITE, requires="small>=0.9.5"), "2.0").is_known


def test_a_release_that_the_patch_has_other_edits_for_will_not_do(small):
    edits = (Rewrite(EDITED, "11", "3", when="small>=1"), Rewrite(EDITED, "11", "4", when="small<1"))
    (small / "layers.py").write_text(LATER)
    assert not table(EDITED, HELPER, v0_9=LATER).compare(part(*edits), "2.0").is_known
    found = table(EDITED, HELPER).compare(part(Rewrite(EDITED, "11", "3", when="small>=2")), "2.0")
    assert found.why == "the patch has other edits for each release that was tested"


@pytest.mark.parametrize("gone", ["function", "module"])
def test_to_be_absent_as_in_a_tested_release_says_nothing(small, gone):
    other = "UNKNOWN = 1\n"
    (small / "layers.py").write_text(other) if gone == "function" else (small / "layers.py").unlink()
    found = table(ADDED, HELPER, source=other).compare(part(SetAttribute(ADDED, value=1)), "2.0")
    assert not found.is_known and found.why == "nothing that the patch rests on is in its source"


def test_what_a_patch_adds_must_be_absent_as_it_was(small):
    known = table(ADDED, HELPER)
    assert known.compare(part(SetAttribute(ADDED, value=1)), "2.0").is_known
    (small / "layers.py").write_text(SOURCE.replace("class Layer:\n", "class Layer:\n    def added(self): ...\n"))
    assert table(ADDED, HELPER).compare(part(SetAttribute(ADDED, value=1)), "2.0").different == (ADDED,)


@pytest.mark.parametrize(
    "text", ["def (", "\0", "x = " + "(" * 300 + ")" * 300, "x = " + "-" * 100_000 + "1", "\udcff"]
)
def test_a_file_that_cannot_be_read_is_not_compared(small, text):
    (small / "layers.py").write_bytes(text.encode("utf-8", "surrogatepass"))
    found = table(EDITED, HELPER).compare(part(REWRITE), "2.0")
    assert (found.release, found.why) == ("", "its source cannot be compared")
    assert not table(EDITED, HELPER).fingerprint(part(REWRITE), {"small": "2.0"})


def test_a_source_file_is_found_as_an_import_finds_it(small):
    assert source_file("small") == small / "__init__.py"
    assert source_file("small.layers") == small / "layers.py"
    assert source_file("small.none") is None
    (small / "layers").mkdir()
    (small / "layers" / "__init__.py").write_text("")
    assert source_file("small.layers") == small / "layers" / "__init__.py" == Path(str(spec("small.layers").origin))


def spec(name: str):
    importlib.invalidate_caches()
    found = importlib.util.find_spec(name)
    sys.modules.pop("small", None)
    assert found is not None
    return found


@pytest.mark.parametrize("suffix", [".pyc", ".abi3.so"])
def test_a_module_that_is_there_without_source_is_an_error(small, suffix):
    if suffix == ".pyc":
        compileall.compile_file(small / "layers.py", quiet=2, legacy=True)
    elif suffix in importlib.machinery.all_suffixes():
        (small / f"layers{suffix}").write_bytes(b"")
    else:
        pytest.skip("no module is named so here")
    (small / "layers.py").unlink()
    with pytest.raises(ValueError, match="small.layers is there without its source"):
        source_file("small.layers")


def test_a_package_that_is_not_there_is_an_error():
    with pytest.raises(ImportError):
        source_file("a_package_that_nobody_has")


@pytest.fixture
def fingerprint(small) -> Callable[..., str]:
    return lambda *edits: table(EDITED, HELPER).fingerprint(part(*edits), {"small": "2.0"})


def test_a_fingerprint_is_of_source_and_edits(small, fingerprint):
    first = fingerprint(REWRITE)
    (small / "layers.py").write_text("# moved\n\n\n" + SOURCE)
    assert first and fingerprint(REWRITE) == first
    assert fingerprint(Rewrite(EDITED, "1", "4")) != first
    (small / "layers.py").write_text(SOURCE.replace("return 2", "return 9"))
    assert fingerprint(REWRITE) not in (first, "")
