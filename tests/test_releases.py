"""What an older release of bitsandbytes runs: all that its source can change, and nothing twice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from patches import REGISTRY
from tests import releases

pytestmark = pytest.mark.skipif(
    not all(map(releases.installed, releases.SHORT)), reason="`make check` puts the releases into .bnb"
)


def test_each_source_that_a_patch_edits_is_tested_once():
    for patch_id in REGISTRY.patches:
        sources = {releases.digest(patch_id, release) for release in releases.SHORT} - {None}
        tested = [release for release in releases.SHORT if releases.is_tested(patch_id, release)]
        assert len(tested) == len(sources), (patch_id, tested)


def test_a_patch_that_edits_nothing_in_bitsandbytes_is_tested_on_the_newest():
    alone = [p.id for p in REGISTRY.patches.values() if not any("bitsandbytes" in str(r) for r in p.requires)]
    assert alone and all(releases.alike(patch_id, releases.SHORT[-1]) == releases.SHORT for patch_id in alone)


def test_a_function_that_is_written_otherwise_is_tested_there(monkeypatch):
    assert not releases.is_tested("bitsandbytes-params4bit-chunk", "0.49.2")
    read = releases._tree

    def other(module: str, folder: Path) -> ast.Module:
        tree = ast.parse(ast.unparse(read(module, folder)))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and folder.name == "0.49.2":
                node.body.insert(0, ast.Pass())
        return tree

    monkeypatch.setattr(releases, "_tree", other)
    releases.digest.cache_clear()
    try:
        assert releases.is_tested("bitsandbytes-params4bit-chunk", "0.49.2")
    finally:
        releases.digest.cache_clear()


@pytest.mark.skipif(not releases.installed("0.48.1"), reason="`make test-all` puts 0.48.1 into .bnb")
def test_another_release_runs_what_is_written_otherwise_on_all_of_these():
    assert releases.is_tested("bitsandbytes-int8-cast-loses-scale", "0.48.1")
    assert not releases.is_tested("bitsandbytes-params4bit-chunk", "0.48.1")


def test_words_change_nothing(tmp_path):
    texts = {"1": 'def f():\n    """Words."""\n    return 1\n', "2": "def f():\n    return 1\n"}
    for release, text in texts.items():
        folder = tmp_path / release / "bitsandbytes"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
    assert len({ast.dump(releases._tree("bitsandbytes", tmp_path / release)) for release in texts}) == 1


@pytest.mark.parametrize("release", releases.SHORT[:-1])
def test_the_files_of_a_release_are_there(release):
    files = releases.files(release)
    assert len(set(files)) == len(files) > 20
    assert all((releases.ROOT / name).is_file() for name in files)
