"""That the benchmark harness runs; never what it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")

from benchmarks import present  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.run import ratio  # noqa: E402

EAGER = {
    "seconds": [1.0, 3.0, 2.0], "cpu_s": [1.0, 1.0, 1.0], "first_s": 4.0, "first_cpu_s": 3.0,
    "graphs": 0, "breaks": 0, "eager_frames": 0, "peak_mib": 5,
}  # fmt: skip
HALF = {**EAGER, "seconds": [0.5, 1.5, 1.0], "cpu_s": [0.1, 0.1, 0.1], "graphs": 3}


def test_one_tiny_case_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    size = ["--size", "tiny", "--rounds", "2", "--steps", "1", "--threads", "1", "--device", "cpu"]
    only = ["--only", "patched eager", "patched compiled", "--backend", "eager", "--no-cost"]
    assert main(["nf4-checkpoint", *size, *only, "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "cpu-tiny.json").read_text())["cases"]["nf4-checkpoint"]["results"]
    assert list(results) == ["patched eager", "patched compiled"]
    eager, result = results.values()
    assert 0 < eager["limit"] < 1 and "limit" not in result
    assert "error" not in result and len(result["seconds"]) == 2 and result["applied"]
    assert result["peak_mib"] > 0 and result["graphs"] > 0 and result["loss"] > 0
    assert "| patched compiled |" in capsys.readouterr().out


def test_an_unknown_case_lists_those_there_are():
    with pytest.raises(SystemExit, match="no case is named nf5; there are nf4-checkpoint, nf4-dora"):
        main(["nf5"])


def test_ratios_are_taken_within_a_round():
    assert ratio({"a": HALF, "b": EAGER}, "a", "b") == 0.5
    assert ratio({"a": HALF, "b": EAGER}, "a", "b", "cpu_s") == 0.1
    assert ratio({"a": HALF, "b": {"error": "crashed"}}, "a", "b") is None


def test_what_failed_is_in_the_table_and_not_in_the_plot(tmp_path: Path):
    results = {"unpatched eager": EAGER, "unpatched compiled": {"error": "a reason"}, "patched compiled": HALF}
    data = {
        "host": {"device": "a chip", "threads": 2, "load": 0.1},
        "size": "small",
        "size_of": {"layers": 1, "hidden": 2, "sequence": 3, "batch": 4},
        "dtype": "float32",
        "backend": "inductor",
        "rounds": 3,
        "cases": {"int8": {"text": "INT8", "results": results}},
    }
    assert "failed: a reason" in present.table(data)
    pytest.importorskip("matplotlib")
    present.plot(data, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
