"""That the benchmark harness runs; never what it measures."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")

from benchmarks import merges, plots, present  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.run import ratio  # noqa: E402

EAGER = {
    "seconds": [1.0, 3.0, 2.0], "cpu_s": [1.0, 1.0, 1.0], "first_s": 4.0, "first_cpu_s": 3.0,
    "graphs": 0, "breaks": 0, "eager_frames": 0, "peak_mib": 5,
}  # fmt: skip
WHOLE = dict.fromkeys(("unpatched eager", "unpatched compiled", "patched eager"), EAGER)
HALF = {**EAGER, "seconds": [0.5, 1.5, 1.0], "cpu_s": [0.1, 0.1, 0.1], "graphs": 3}


@pytest.mark.release("the pair of eager processes, and the tests of the table")
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


def test_merges_that_end_differently_are_not_compared():
    def ways(unpatched: str, patched: str) -> dict:
        return {"unpatched": {"seconds": [0.1], "error": unpatched}, "patched": {"seconds": [0.2], "error": patched}}

    table = merges.table({"same": ways("", ""), "refused": ways("", "NotImplementedError")})
    same, refused = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:])
    assert same == ["same", "100.0", "200.0", "2.00", "merged", "merged"]
    assert refused == ["refused", "100.0", "200.0", "", "merged", "NotImplementedError"]


def test_what_failed_is_in_the_table_and_not_in_the_picture():
    results = {"unpatched eager": EAGER, "unpatched compiled": {"error": "a reason"}, "patched compiled": HALF}
    data = {
        "host": {"device": "a chip", "threads": 2, "load": 0.1},
        "size": "small",
        "size_of": {"layers": 1, "hidden": 2, "sequence": 3, "batch": 4},
        "dtype": "float32",
        "backend": "inductor",
        "rounds": 3,
        "cases": {
            "int8": {"text": "INT8", "results": results},
            "nf4": {"text": "4-bit", "results": {**WHOLE, "patched compiled": HALF}},
        },
    }
    assert "failed: a reason" in present.table(data)
    (panel,) = plots.steps(data, "a file").panels
    assert [row.label for row in panel.rows] == ["4-bit"]
    assert [bar.text for bar in panel.rows[0].bars] == ["1.00", "0.50"]


def words(svg: str) -> list[str]:
    """What the picture says, from top to bottom; lines and colors are another matter in each release of matplotlib."""
    return [
        "".join(each.itertext()).strip()
        for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def bars(svg: str) -> int:
    return sum("fill: #d55e00" in path or "fill: #0072b2" in path for path in svg.splitlines())


@pytest.mark.parametrize("name", plots.PICTURES)
def test_a_picture_in_the_repository_is_that_of_the_results(name: str):
    """To draw them again: ``python -m benchmarks.plots``."""
    pytest.importorskip("matplotlib", reason="the extra `bench` brings matplotlib")
    picture = plots.made()[name]
    kept, drawn = (plots.RESULTS / f"{name}.svg").read_text("utf-8"), plots.draw(picture)
    assert words(kept) == words(drawn) and bars(kept) == bars(drawn)
    said = [bar.text for panel in picture.panels for row in panel.rows for bar in row.bars]
    assert picture.title in words(kept) and set(said) <= set(words(kept))


def test_no_picture_is_left_over():
    assert {path.stem for path in plots.RESULTS.glob("*.svg")} == plots.PICTURES.keys()


def test_the_bars_in_readme_are_those_of_the_results():
    readme = plots.README.read_text("utf-8")
    assert "<!-- bars: steps" in readme and plots.with_bars(readme, plots.made()) == readme


def test_a_result_that_changes_is_seen_in_its_picture_and_in_no_other(tmp_path: Path):
    for file in {file for _, files in plots.PICTURES.values() for file in files}:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text((plots.RESULTS / file).read_text("utf-8"), "utf-8")
    before = plots.made(tmp_path)
    data = json.loads((tmp_path / "gpu/does_not_fit.json").read_text("utf-8"))
    data["ways"]["4 bits, CPU"]["to_device"] *= 2
    (tmp_path / "gpu/does_not_fit.json").write_text(json.dumps(data))
    (tmp_path / "experts.json").unlink()
    after = plots.made(tmp_path)
    assert before.keys() - after.keys() == {"experts"}, "nothing is drawn without its results"
    assert [name for name in after if after[name] != before[name]] == ["offload"]
    assert " 1.48" in plots.as_text(after["offload"]) and "0.49 of the bytes" in after["offload"].title


@pytest.mark.release("another entry point of the harness that the tiny case runs")
def test_one_pair_of_eager_processes(tmp_path: Path, capsys: pytest.CaptureFixture):
    from benchmarks import eager

    assert eager.main(["--pairs", "1", "--rounds", "1", "--size", "tiny", "--output", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "eager.json").read_text())
    assert list(data["cases"]) == [case.name for case in eager.ALL]
    for (pair,) in data["cases"].values():
        assert set(pair["counts"]) == set(pair["cpu_s"]) == {"unpatched", "patched"}
        assert pair["counts"]["patched"]["products"] > 0 and pair["cpu_s"]["patched"][0] > 0
    # q and v are 2 of the 7 layers of a block: fewer products than where all learn
    few, all_of_them = (data["cases"][name][0]["counts"]["patched"] for name in ("nf4-qv-checkpoint", "nf4-checkpoint"))
    assert few["products"] < all_of_them["products"]
    assert "4-bit, LoRA on q and v" in capsys.readouterr().out


def test_products_and_what_is_carried_are_counted():
    bnb = pytest.importorskip("bitsandbytes")
    torch = pytest.importorskip("torch")
    from benchmarks import counts

    layer = bnb.nn.Linear8bitLt(32, 32, bias=False, has_fp16_weights=False, threshold=6.0).to("cpu").eval()
    weight, x = torch.ones(32, 32, requires_grad=True), torch.ones(4, 32)
    assert counts.products(lambda: (x @ weight, layer(x), x + 1)) >= 2
    assert counts.products(lambda: x + 1) == 0
    codes = torch.ones(8, dtype=torch.int8)

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, codes)
            return x.clone()

    assert counts.carried(lambda: Keeping.apply(weight)) == (32 * 32 * 4 + 8, 8)


def test_the_table_of_eager_costs_says_ratio_and_difference():
    from benchmarks import eager

    def counts(products: int, weights: int, python: int) -> dict[str, int]:
        carried = {"carried": 2**20 + weights, "carried_weights": weights}
        return {"products": products, **carried, "python": python, "ours": python - 1000, "c": 500}

    both = {"unpatched": counts(26, 0, 1000), "patched": counts(28, 2**20, 1015)}
    seconds = {"unpatched": [1.0, 2.0, 4.0], "patched": [1.1, 2.0, 4.8]}
    in_turn = {"unpatched": [1.0, 1.0], "patched": [0.9, 0.9]}
    one = {"text": "a case", "cpu_s": seconds, "in_one_process": in_turn, "counts": both}
    calls = {
        "a forward": [{"unpatched": 10.0, "patched": 12.5}],
        "forward and backward": [{"unpatched": 10.0, "patched": 9.0}],
    }
    here = {"processor": "a processor (family 25)", "load": 0.1, "torch": "2.13.0", "bitsandbytes": "0.50.2"}
    text = eager.table({"host": here, "cases": {"a": [one]}, "calls": calls})
    assert text.startswith("a processor (family 25), one thread, load 0.1, torch 2.13.0, bitsandbytes 0.50.2")
    assert "1.100 (1.100 to 1.100)" in text and "+2.5 (+2.5 to +2.5)" in text and "-1.0" in text
    step, functions = (line.split("|")[2:-1] for line in text.splitlines() if line.startswith("| a case"))
    assert [cell.strip() for cell in step[3:]] == ["0.900 (0.900 to 0.900)", "26", "28", "1.0", "2.0", "0.0", "1.0"]
    assert [cell.strip() for cell in functions] == ["1000", "1015", "1.015", "15", "500", "500"]


def test_functions_are_counted_by_whose_they_are():
    from benchmarks import counts
    from patches.engine import gate

    assert counts.functions(lambda: len([])) == {"python": 1, "c": 2, "ours": 0}  # the lambda; len() and setprofile()
    found = counts.functions(lambda: gate.satisfied("torch"))
    assert found["ours"] >= 1 and found["python"] > found["ours"]


def test_the_shares_of_a_step_are_named_by_what_called_an_operator():
    from types import SimpleNamespace

    from benchmarks import step_shares

    def event(*names: str) -> object:
        above = None
        for name in names:
            above = SimpleNamespace(name=name, cpu_parent=above)
        return above

    kinds = {
        ("MatMul4Bit", "bitsandbytes::gemm_4bit", "aten::linear", "aten::addmm", "aten::copy_"): "products",
        ("MatMul4Bit", "bitsandbytes::gemm_4bit", "aten::copy_"): "dequantizing",
        ("aten::to", "aten::_to_copy", "aten::copy_"): "copies",
        ("aten::silu",): "operators",
    }
    assert {names: step_shares._kind(event(*names)) for names in kinds} == kinds
    way = {"kind": "4 bits", "place": "disk", "ms": 12.4, "shares": dict.fromkeys(step_shares.KINDS, 1 / 7)}
    host = {"processor": "a chip", "load": 1, "torch": "2", "bitsandbytes": "0", "tokens": 3, "hidden": 4}
    assert "| 4 bits, disk |" in (text := step_shares.table({"host": host, "ways": [way]})) and text.count("14.3%") == 7
