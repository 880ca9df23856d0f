"""The tool of the table: environments are built once for what they hold, and a part that is run again replaces that part."""

from __future__ import annotations

import json

import pytest

from tests.stacks import flows, ranks
from tools import stacks as tool


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name, file in (("RESULTS", "stacks.json"), ("SHIPPED", "table.json")):
        monkeypatch.setattr(tool, name, tmp_path / file)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    for variable in ("IDS", "FLOWS"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def test_an_environment_is_built_again_only_if_it_is_to_hold_something_else(here, monkeypatch):
    built = []

    def run(*command: object) -> str:
        folder = command[-2]
        (here / ".stacks" / "some").mkdir(parents=True)
        built.append((folder, command[-1]))
        return ""

    monkeypatch.setattr(tool, "run", run)
    for release in ("peft==0.17.1", "peft==0.17.1", "peft==0.18.1"):
        folder = tool._installed("some", release)
    assert built == [(str(folder), "peft==0.17.1"), (str(folder), "peft==0.18.1")]


@pytest.mark.parametrize(
    ("variable", "part", "before", "again", "after"),
    [("IDS", "verify", [("a", "wrong"), ("b", "ok")], [("a", "ok")], [("a", "ok"), ("b", "ok")]),
     ("FLOWS", "flows", {"a": "1", "b": "0"}, {"a": "0"}, {"a": "0", "b": "0"}),
     ("", "flows", {"a": "1", "b": "0"}, {"a": "0"}, {"a": "0"})],
)  # fmt: skip
def test_what_is_run_again_replaces_what_was_found(here, monkeypatch, variable, part, before, again, after):
    def found(said):
        return [{"id": i, "verdict": word, "reason": ""} for i, word in said] if part == "verify" else said

    tool._keep("oldest", {"torch": "2.6.0"}, part, found(before))
    if variable:
        monkeypatch.setenv(variable, "a")
    tool._keep("oldest", {"torch": "2.6.0"}, part, found(again))
    assert json.loads(tool.RESULTS.read_text("utf-8"))["oldest"]["2.6.0"][part] == found(after)


def test_a_word_chooses_flows():
    names = [*flows.FLOWS, *ranks.cells().values()]
    chosen = [name for name in names if flows.is_chosen(name, ["graphs", "FSDP2"])]
    assert chosen and all("graphs" in name or "FSDP2" in name for name in chosen)
    assert [name for name in names if flows.is_chosen(name, [])] == names
