"""A stack with a Python of its own: which one is taken, where it is made, and when it is run."""

from __future__ import annotations

import pytest

from tools import stacks as tool
from tools.commands import Failed

STACK = {"python": "3.12", "torch": "2.11.0", "transformers": "5.17.0", "beside": ["idna"]}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The commands, in the order in which they were given; none is run."""
    given: list[tuple[str, ...]] = []

    def run(*command: object, **_: object) -> str:
        given.append(tuple(map(str, command)))
        if "venv" in command:
            (tmp_path / ".stacks" / "torch-2.11" / "bin").mkdir(parents=True, exist_ok=True)
        return ""

    monkeypatch.setattr(tool, "run", run)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return given


def test_it_lies_in_an_environment_that_is_made_once(asked, tmp_path):
    base = tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python"
    base.parent.mkdir(parents=True)
    base.touch()
    python = tmp_path / ".stacks" / "torch-2.11" / "bin" / "python"
    for _ in range(2):
        assert tool._python("torch 2.11", STACK) == python
    made, installed = asked
    assert made == (str(base), "-m", "venv", str(python.parents[1]))
    assert installed[0] == str(python) and {"torch==2.11.0", "transformers==5.17.0", "idna"} <= set(installed)


def test_a_python_that_is_not_there_is_an_error_that_says_how_to_get_it(asked):
    with pytest.raises(Failed, match="Python 3.99 is not installed: `pyenv install 3.99`"):
        tool._python("torch 2.11", {**STACK, "python": "3.99"})
    assert not asked


@pytest.mark.parametrize(
    ("torch", "names", "run"),
    [("", [], ["plain"]), ("pinned", [], ["plain", "other"]), ("", ["other"], ["other"])],
)
def test_it_is_run_where_it_is_named_and_before_a_release(torch, names, run, monkeypatch):
    done: list[str] = []
    stacks = {"plain": {"torch": "2.13.0"}, "other": STACK}
    monkeypatch.setattr(tool, "declared", lambda: stacks)
    monkeypatch.setattr(tool, "measured", lambda name, *_: done.append(name))
    monkeypatch.setenv("TORCH", torch)
    assert tool.main(names) == 0 and done == run
