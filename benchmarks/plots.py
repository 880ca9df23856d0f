"""``python -m benchmarks.plots``: the pictures of the documentation, drawn from the files in ``benchmarks/results``.

Nothing is measured, and every figure in a picture comes from a file. The same files give the same bytes on each machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from .run import ratio

RESULTS = Path(__file__).parent / "results"
WITHOUT, WITH, BESIDE = "#d55e00", "#0072b2", "#8a8f98"
"""Vermilion, blue and gray: people who cannot tell red from green can tell these apart."""
INK, GRAY, PAPER = "#24292f", "#57606a", "#ffffff"
WIDTH, MARGIN, LABELS = 800, 24, 270
BAR, GAP = 20, 18


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
    parts: list[str] = []
    top = MARGIN + 12
    parts.append(_text(MARGIN, top, picture.title, 16, weight=700))
    for at, (color, meaning) in enumerate(picture.legend):
        left = MARGIN + 200 * at
        parts += [_rect(left, top + 16, 14, 14, color), _text(left + 22, top + 28, meaning, 14)]
    top += 40 if picture.legend else 12
    width = (WIDTH - MARGIN - LABELS) / len(picture.panels)
    for at, panel in enumerate(picture.panels):
        bottom = _panel(parts, panel, LABELS + at * width, top, width, labelled=at == 0)
    for line in picture.notes:
        bottom += 17
        parts.append(_text(MARGIN, bottom, line, 11, color=GRAY))
    height = bottom + 14
    body = "\n".join([_rect(0, 0, WIDTH, height, PAPER), *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img">\n<title>{escape(picture.title)}</title>\n{body}\n</svg>\n'
    )


def _panel(parts: list[str], panel: Panel, left: float, top: float, width: float, labelled: bool) -> float:
    """Draw the bars of ``panel``, with the labels of the rows at the left edge of the picture; return where they end."""
    values = [bar.value for row in panel.rows for bar in row.bars]
    ends = values + ([panel.mark[0]] if panel.mark else [])
    scale = (width - 70) / max(ends)  # 70: the figure at the end of a bar
    parts.append(_text(left, top + 16, panel.title, 13, color=GRAY))
    y = first = top + 30
    figures = []
    for row in panel.rows:
        if labelled:
            parts.append(_text(LABELS - 12, y + len(row.bars) * BAR / 2 + 5, row.label, 14, anchor="end"))
        for bar in row.bars:
            parts.append(_rect(left, y + 1, max(bar.value * scale, 1), BAR - 2, bar.color))
            figures.append(_text(left + bar.value * scale + 6, y + BAR - 5, bar.text, 14))
            y += BAR
        y += GAP
    if panel.mark:
        x = left + panel.mark[0] * scale
        parts.append(f'<path d="M{x:.1f} {first - 4:g}V{y - GAP + 4:g}" stroke="{INK}" stroke-dasharray="4 3"/>')
        parts.append(_text(x, y - GAP + 19, panel.mark[1], 13, anchor="middle"))
        y += 8
    parts += figures  # over the line
    return y


def _rect(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{color}"/>'


def _text(
    x: float, y: float, text: str, size: int, *, anchor: str = "start", weight: int = 400, color: str = ""
) -> str:
    """A line of text, with an edge of white that keeps it apart from a line behind it."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{color or INK}" stroke="{PAPER}" stroke-width="4" paint-order="stroke">{escape(text)}</text>'
    )


PICTURES: dict[str, tuple[Callable[..., Picture], tuple[str, ...]]] = {
    "steps": (steps, ("cpu.json",)),
    "steps_on_gpu": (steps, ("gpu/training.json",)),
    "offload": (offload, ("gpu/does_not_fit.json",)),
    "experts": (experts, ("experts.json", "experts_loading.json")),
}
"""Each picture, and the results that it is drawn from."""


def drawn(results: Path = RESULTS) -> dict[str, str]:
    """Return each picture whose results are there, by the name of its file."""
    pictures = {}
    for name, (make, files) in PICTURES.items():
        if all((results / file).exists() for file in files):
            data = [json.loads((results / file).read_text("utf-8")) for file in files]
            named = " and ".join(f"benchmarks/results/{file}" for file in files)
            pictures[f"{name}.svg"] = draw(make(*data, named))
    return pictures


def main(results: Path = RESULTS) -> int:
    for name, text in drawn(results).items():
        (results / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
