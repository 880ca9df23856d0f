"""``python -m benchmarks.plots``: the pictures of the documentation, drawn from the files in ``benchmarks/results``.

Nothing is measured, and every figure in a picture comes from a file. README has the same bars as text, because an index
of packages shows no picture that lies beside it. ``pip install 'bnb-patches[bench]'`` brings matplotlib.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .run import ratio

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
WITHOUT, WITH, BESIDE = "#d55e00", "#0072b2", "#8a8f98"
"""Vermilion, blue and gray: people who cannot tell red from green can tell these apart."""
INK, GRAY = "#24292f", "#57606a"
WIDTH, BAR = 8.0, 0.24
"""Inches: of a picture, and of a bar and the room above it."""
GAP = 0.8
"""Bars, between two rows."""
COLUMNS = 44
"""Letters: of the longest bar in README."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bnb-patches",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 9.5,
}
"""Text stays text, and names that matplotlib makes up are the same each time."""


class Bar(NamedTuple):
    value: float
    text: str
    """The value as it is written at the end of the bar."""
    color: str


class Row(NamedTuple):
    label: str
    bars: Sequence[Bar]


class Panel(NamedTuple):
    title: str
    """What the bars measure, and in which unit."""
    rows: Sequence[Row]
    mark: tuple[float, str] | None = None
    """A value that a vertical line shows, and its name."""


class Picture(NamedTuple):
    title: str
    """The one thing that it says."""
    panels: Sequence[Panel]
    legend: Sequence[tuple[str, str]]
    """Colors and what they mean."""
    notes: Sequence[str]
    """The machine, what was measured on it, and the file."""


def steps(data: dict[str, Any], file: str) -> Picture:
    """Time of compiled steps over that of eager ones, without the patches and with them."""
    states = (("unpatched", WITHOUT), ("patched", WITH))
    found = {
        case["text"]: [ratio(case["results"], f"{state} compiled", f"{state} eager") for state, _ in states]
        for case in data["cases"].values()
    }
    found = {text: ratios for text, ratios in found.items() if None not in ratios}  # an error in the table is not drawn
    rows = [
        Row(text, [Bar(value, f"{value:.2f}", color) for value, (_, color) in zip(ratios, states)])
        for text, ratios in found.items()
    ]
    best = max(found, key=lambda text: found[text][0] / found[text][1])
    host, size = data["host"], data["size_of"]
    return Picture(
        f"With the patches, compiled {best.split(',')[0]} takes {found[best][1]:.2f} of the eager time",
        [Panel("compiled training step, as a share of the eager one (less is faster)", rows, (1, "eager"))],
        [(WITHOUT, "without the patches"), (WITH, "with the patches")],
        [f"{host['device']}, {host['threads']} thread{'s' * (host['threads'] > 1)}; Llama of {size['layers']} layers, width "
         f"{size['hidden']}, {data['dtype']}; medians of {data['rounds']} rounds", file],
    )  # fmt: skip


def offload(data: dict[str, Any], file: str) -> Picture:
    """What a step copies to the GPU and how long it takes, in 16 bits and in 4, with layers on the CPU or the disk."""
    ways = data["ways"]
    labels = {
        "16 bits, CPU": ("16 bits, layers on the CPU", WITHOUT),
        "4 bits, CPU": ("4 bits, layers on the CPU", WITH),
        "16 bits, disk": ("16 bits, layers on the disk", WITHOUT),
        "4 bits, disk": ("4 bits, layers on the disk", WITH),
        "4 bits, whole": ("4 bits, all on the GPU", BESIDE),
    }

    def rows(key: str, by: float, form: str) -> list[Row]:
        return [Row(label, [Bar(ways[name][key] / by, f"{ways[name][key] / by:{form}}", color)])
                for name, (label, color) in labels.items()]  # fmt: skip

    bits, whole = ways["4 bits, CPU"], ways["16 bits, CPU"]
    return Picture(
        f"Offloaded in 4 bits: {bits['to_device'] / whole['to_device']:.2f} of the bytes, {bits['of_16_bits']:.2f} of the time "
        "of 16 bits",
        [Panel("GB copied to the GPU in a step", rows("to_device", 1e9, ".2f")),
         Panel("milliseconds a step", rows("ms", 1, ".0f"))],
        [],
        [f"{data['host']['device']}; Llama of {data['parameters'] / 1e9:.1f} billion parameters, LoRA, {bits['away']} of "
         f"{data['layers']} layers offloaded; the files are in the page cache", file],
    )  # fmt: skip


def experts(stepped: dict[str, Any], loaded: dict[str, Any], files: str) -> Picture:
    """The most memory that a mixture takes while it is loaded and in a training step, in bfloat16 and in 4 bits."""
    models = next(each for each in stepped["steps"] if each["implementation"] == "grouped_mm")["models"]
    loads = {each["way"]: each["peak"] for each in loaded["loads"] if each["device"] == "cpu"}
    sizes = {
        "loading, MB": (loads["in floating point"], loads["quantized"]),
        "a training step with LoRA, MB": tuple(
            models[name]["peak"] / 1e6 for name in ("bfloat16", "experts in 4 bits, bfloat16")
        ),
    }
    panels = [
        Panel(title, [Row(label, [Bar(size, f"{size:,.0f}", color)])
                      for size, label, color in zip(pair, ("experts in bfloat16", "experts in 4 bits"), (WITHOUT, WITH))])
        for title, pair in sizes.items()
    ]  # fmt: skip
    loading, step = (quantized / whole for whole, quantized in sizes.values())
    return Picture(
        f"Experts in 4 bits: {loading:.2f} of the memory while loading, {step:.2f} in a training step",
        panels,
        [],
        [f"most CPU memory, {stepped['host']['processor']}; loading {loaded['sizes']['experts']:,.0f} MB of experts, and a step "
         f"of another model of {models['bfloat16']['bytes'] / 1e6:.0f} MB", files],
    )  # fmt: skip


def draw(picture: Picture) -> str:
    """Return the picture as SVG, on white, so that it can be read on a dark page too."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = max(sum(len(row.bars) + GAP for row in panel.rows) for panel in picture.panels)
    above, below = 0.75 + 0.3 * bool(picture.legend), 0.35 + 0.2 * len(picture.notes)
    height = above + BAR * lines + below
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, len(picture.panels), figsize=(WIDTH, height), sharey=True, squeeze=False)
        figure.subplots_adjust(left=0.33, right=0.97, top=1 - above / height, bottom=below / height, wspace=0.08)
        figure.text(0.03, 1 - 0.28 / height, picture.title, size=12, weight="bold")
        for axis, panel in zip(axes[0], picture.panels):
            _panel(axis, panel)
        if picture.legend:
            handles = [matplotlib.patches.Patch(color=color, label=meaning) for color, meaning in picture.legend]
            figure.legend(
                handles=handles, loc="upper left", bbox_to_anchor=(0.015, 1 - 0.36 / height), ncols=2, frameon=False
            )
        figure.text(0.03, 0.1 / height, "\n".join(picture.notes), size=7.5, color=GRAY)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Title": picture.title})
        pyplot.close(figure)
    return text.getvalue()


def _panel(axis: Any, panel: Panel) -> None:
    """Draw the bars of ``panel`` from top to bottom, each with its figure at its end."""
    y, places = 0.0, []
    for row in panel.rows:
        places.append(y + (len(row.bars) - 1) / 2)
        for bar in row.bars:
            axis.barh(y, bar.value, 0.9, color=bar.color)
            axis.annotate(bar.text, (bar.value, y), (4, 0), textcoords="offset points", va="center")
            y += 1
        y += GAP
    axis.set_yticks(places, [row.label for row in panel.rows])
    axis.set_title(panel.title, loc="left", size=9, color=GRAY)
    axis.set_ylim(y - GAP - 0.5, -0.5)
    axis.set_xlim(
        0, 1.15 * max([bar.value for row in panel.rows for bar in row.bars] + [panel.mark[0] if panel.mark else 0])
    )
    axis.set_xticks(*([[panel.mark[0]], [panel.mark[1]]] if panel.mark else [[]]))
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    if panel.mark:
        axis.axvline(panel.mark[0], color=INK, linewidth=0.8, linestyle="--", zorder=3)


PICTURES: dict[str, tuple[Callable[..., Picture], tuple[str, ...]]] = {
    "steps": (steps, ("cpu.json",)),
    "steps_on_gpu": (steps, ("gpu/training.json",)),
    "offload": (offload, ("gpu/does_not_fit.json",)),
    "experts": (experts, ("experts.json", "experts_loading.json")),
}
"""Each picture, and the results that it is drawn from."""


def made(results: Path = RESULTS) -> dict[str, Picture]:
    """Return each picture whose results are there, by its name."""
    pictures = {}
    for name, (make, files) in PICTURES.items():
        if all((results / file).exists() for file in files):
            data = [json.loads((results / file).read_text("utf-8")) for file in files]
            named = " and ".join(f"benchmarks/results/{file}" for file in files)
            pictures[name] = make(*data, named)
    return pictures


def as_text(picture: Picture) -> str:
    """Return the bars of ``picture`` as lines of text."""
    meanings = dict(picture.legend)
    labels = max(len(row.label) for panel in picture.panels for row in panel.rows)
    names = max(map(len, meanings.values()), default=0)
    lines = []
    for panel in picture.panels:
        lines.append(panel.title)
        longest = max(bar.value for row in panel.rows for bar in row.bars)
        for row in panel.rows:
            for number, bar in enumerate(row.bars):
                head = f"  {'' if number else row.label:{labels}}  {meanings.get(bar.color, ''):{names}}".rstrip()
                drawn = "\N{FULL BLOCK}" * round(COLUMNS * bar.value / longest)
                lines.append(f"{head:{labels + names + 4}}  {drawn} {bar.text}")
    return "\n".join(lines)


def with_bars(readme: str, pictures: Mapping[str, Picture]) -> str:
    """Return ``readme`` with the bars of ``pictures`` between the comments that ask for them."""

    def bars(found: re.Match[str]) -> str:
        return f"{found[1]}\n```\n{as_text(pictures[found[2]])}\n```\n{found[3]}"

    return re.sub(r"(<!-- bars: (\w+)[^>]*-->)\n.*?(<!-- end -->)", bars, readme, flags=re.DOTALL)


def main() -> int:
    pictures = made()
    for name, picture in pictures.items():
        (RESULTS / f"{name}.svg").write_text(draw(picture), "utf-8")
    README.write_text(with_bars(README.read_text("utf-8"), pictures), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
