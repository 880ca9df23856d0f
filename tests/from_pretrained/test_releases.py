"""The rules on older releases of transformers, each in a process of its own; `make check` and `make from-pretrained` install them."""

from __future__ import annotations

import pytest

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")

from .programs import MODELS, some  # noqa: E402
from .releases import DAILY, RELEASES, Release  # noqa: E402

FEW, MANY = len(MODELS), 80


def right(release: Release, count: int) -> None:
    if not release.is_installed:
        pytest.skip(
            f"transformers {release} is not in .stacks: `python -m tests.from_pretrained.releases --some 1` installs it"
        )
    done = release.run("--some", str(count), capture=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"transformers {release}: of {count} programs {count} right" in done.stdout


def test_each_model_once():
    right(DAILY, FEW)


@pytest.mark.release("test_each_model_once, on one of them")
@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_many_programs(release):
    right(release, MANY)


def test_few_are_enough_for_each_model():
    assert {program.model for program in some(FEW)} == MODELS.keys()
