"""Every bit of a result counts in its digest, and nothing else does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from patches.adoption.digests import digest_of_results  # noqa: E402

VALUES = {
    "zero": torch.zeros(2, 3),
    "negative zero": -torch.zeros(2, 3),
    "the smallest number in one place": torch.zeros(2, 3).index_fill(1, torch.tensor(0), 1e-45),
    "another shape": torch.zeros(3, 2),
    "no rows": torch.zeros(0, 3),
    "no columns": torch.zeros(2, 0),
    "a scalar": torch.zeros(()),
    "another dtype of the same bits": torch.zeros(2, 3, dtype=torch.int32),
    "NaN": torch.full((2, 3), float("nan")),
    "in a list": [torch.zeros(2, 3)],
    "under a name": {"weight": torch.zeros(2, 3)},
    "under another name": {"bias": torch.zeros(2, 3)},
    "not there": None,
    "text": "0",
    "a number": 0,
    "an exact number": 0.0,
    "a truth value": False,
    "a dtype": torch.float32,
}


def test_other_results_have_other_digests():
    found = {digest_of_results(value): name for name, value in VALUES.items()}
    assert list(found.values()) == list(VALUES)


def test_where_a_result_ends_counts():
    assert digest_of_results(["a"], "b") != digest_of_results(["a", "b"]) != digest_of_results("ab")
    assert digest_of_results({"a": 0, "b": 1}) != digest_of_results({"b": 1, "a": 0})


@pytest.mark.parametrize("alike", [
    torch.nn.Parameter(torch.arange(6.0).view(2, 3)),
    torch.arange(12.0).view(2, 6)[:, ::2].sub(torch.tensor([[0.0, 1, 2], [3, 4, 5]])),
    torch.tensor([[0.0, 3], [1, 4], [2, 5]]).t(),
], ids=["a parameter", "computed", "transposed in memory"])  # fmt: skip
def test_class_and_memory_do_not_count(alike):
    assert digest_of_results(alike) == digest_of_results(torch.arange(6.0).view(2, 3))


def test_what_has_no_bits_of_its_own_is_refused():
    with pytest.raises(TypeError, match="not of Linear"):
        digest_of_results(torch.nn.Linear(1, 1))
