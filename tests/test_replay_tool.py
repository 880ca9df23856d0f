"""The tool of docs/replay.json: which releases it finds, what goes beside them, and that it keeps what it found."""

from __future__ import annotations

import json

import pytest

from tools.replay import verified as tool
from tools.stacks import declared

OFFERED = ["5.24.0", "5.23.1", "5.23.0", "5.0.0", "4.57.6", "0.50.2", "0.50.1", "0.46.1", "0.46.0"]


def test_each_release_from_the_oldest_on_is_run_the_newest_first():
    assert tool.chosen("transformers", OFFERED) == ["5.24.0", "5.23.1", "5.23.0", "5.0.0"]
    assert tool.chosen("bitsandbytes", OFFERED)[-2:] == ["0.50.1", "0.46.1"]


@pytest.mark.parametrize("package", tool.OLDEST)
def test_the_oldest_release_has_neighbours_of_the_table(monkeypatch, package):
    monkeypatch.setattr(tool, "installed", lambda folder, *what: (folder.name, what))
    stacks = declared()
    assert all(one.stack in stacks for one in tool.NEIGHBOURS[package])
    for one in tool.NEIGHBOURS[package]:
        found = tool.Release(package, f"{one.since}.1").folders()[1:]
        what = {text for _, texts in found for text in texts[1:]}
        stack = stacks[one.stack]
        beside = {f"{name}=={stack[name]}" for name in one.packages} | {*stack.get("beside", ())}
        assert what <= beside
        assert {text.partition("==")[0] for text in beside - what} <= (set() if one.torchao else {"torchao"})
    assert tool.Release(package, tool.OLDEST[package]).folders()


def test_what_was_found_is_kept_and_not_run_again_unless_it_is_named(tmp_path, monkeypatch):
    ran = []

    def verified(release):
        ran.append(str(release))
        return {"versions": {}, "verify": [{"id": "a", "verdict": "ok", "reason": str(len(ran))}]}

    monkeypatch.setattr(tool, "RESULTS", tmp_path / "replay.json")
    monkeypatch.setattr(tool.Release, "verified", verified)
    monkeypatch.setattr(tool, "offered", lambda package: ["0.20.0", "0.20.1"] if package == "peft" else [])
    assert [tool.main(arguments) for arguments in ([], [], ["peft==0.19.1"], ["peft==0.20.1"])] == [0, 0, 0, 0]
    assert ran == ["peft==0.20.1", "peft==0.20.0", "peft==0.19.1", "peft==0.20.1"]
    known = json.loads(tool.RESULTS.read_text("utf-8"))
    assert {name: found["verify"][0]["reason"] for name, found in known.items()} == {
        "peft==0.20.1": "4", "peft==0.20.0": "2", "peft==0.19.1": "3",
    }  # fmt: skip
    assert list(known) == ["peft==0.20.1", "peft==0.20.0", "peft==0.19.1"]
    assert '{"id": "a", "verdict": "ok", "reason": "2"}\n' in tool.RESULTS.read_text("utf-8")


def test_what_some_patches_say_anew_replaces_their_rows_of_the_releases_that_were_run(tmp_path, monkeypatch):
    def found(**words):
        return {"versions": {}, "verify": [{"id": name, "verdict": word, "reason": ""} for name, word in words.items()]}

    monkeypatch.setattr(tool, "RESULTS", tmp_path / "replay.json")
    monkeypatch.setattr(tool, "offered", lambda package: ["0.20.0", "0.21.0"] if package == "peft" else [])
    tool.keep(tool.Release("peft", "0.20.0"), found(a="wrong", b="ok"))
    monkeypatch.setenv("IDS", "a")
    monkeypatch.setattr(tool.Release, "verified", lambda release: found(a="ok"))
    assert tool.main([]) == 0
    assert json.loads(tool.RESULTS.read_text("utf-8")) == {"peft==0.20.0": found(a="ok", b="ok")}


def test_what_is_no_release_is_refused(capsys):
    assert tool.main(["trl==1.0"]) == 2 and tool.main(["peft"]) == 2
    assert "'peft' is no release" in capsys.readouterr().err
