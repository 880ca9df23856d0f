"""``Registry.prepare``: the code that apply puts in, made before it is asked for."""

from __future__ import annotations

from patches.engine import match
from patches.engine.build import Builder
from patches.engine.compiler import KeepingCompiler
from patches.engine.edits import Rewrite
from patches.engine.report import Status
from tests.engine.test_registry import snapshot


def test_prepare_makes_the_code_that_apply_puts_in_and_changes_nothing(toy, registry, tmp_path, monkeypatch):
    before, made = snapshot(toy), []
    rewrite = match.rewrite
    monkeypatch.setattr(match, "rewrite", lambda *args: made.append(args) or rewrite(*args))
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),))
    r._builder = Builder(KeepingCompiler(tmp_path / "kept"))
    r.prepare()
    assert snapshot(toy) == before and not r.report().with_status(Status.APPLIED)
    assert len(made) == 1
    r.apply(strict=True)
    assert len(made) == 1 and toy.plain(3) == 12
    r.revert()
    assert snapshot(toy) == before
