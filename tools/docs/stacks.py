"""The table of whole stacks in ``docs/releases.md``, from what ``make stacks`` has found."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.stacks.flows import FLOWS, is_right
from tools.stacks import RESULTS, declared, series

from . import gpu

PACKAGES = ("transformers", "peft", "accelerate", "bitsandbytes", "trl", "diffusers")
HOW = ("unpatched", "patched")
LEFT = "this release has the defect, and the patch does not repair it here"
"""What `verify` says of them."""
Found = Mapping[str, Any]
REASONS = (
    (
        "Some modules are dispatched|cannot send layers of such a checkpoint",
        "[models that do not fit](does_not_fit.md) load with accelerate 1.1 and later",
    ),
    (
        "FSDP2 of torch before 2.9 adds up",
        "FSDP2 of torch 2.8 adds up the gradients of the ranks on a CPU, so that quantized layers are still refused there; no GPU was tried",
    ),
    (
        "INT8: FSDP2, checkpoint.*nothing was saved",
        "FSDP2 of this torch does not shard INT8 layers: see INT8: FSDP2, LoRA",
    ),
    (
        "INT8: FSDP2.*floating point dtype can require gradients",
        "FSDP2 of torch 2.6 wants one dtype for all parameters that it shards together: INT8 weights cannot lie beside an adapter",
    ),
    (
        "4-bit: FSDP2.*(only supports uint8 storage|nothing was saved)",
        "bitsandbytes of this stack computes on a CPU from uint8 storage only, and FSDP2 of torch 2.6 wants one dtype for all parameters that it shards together; no GPU was tried",
    ),
    (
        "FSDP2.*'gradients': 1.0",
        "FSDP2 of torch 2.8 adds up the gradients of the ranks on a CPU, of models in floating point too, where it should average them; no GPU was tried",
    ),
    (
        "graphs, DoRA: InternalTorchDynamoError",
        "Dynamo of torch 2.6 fails where peft 0.14 assigns the weight again in each DoRA forward on a CPU; without the plugin peft 0.14 cannot run DoRA on a CPU",
    ),
    (
        "quant_type must be nf4 on CPU, got fp4",
        "accelerate 0.26 leaves the quantization state behind when it moves a 4-bit weight; accelerate 1.8.1 takes it along",
    ),
    (
        "Trainer, resumed.*TorchTensorParallelPlugin",
        "the Trainer of transformers 4.53 cannot be imported beside accelerate 0.26, without the plugin too; beside 1.8.1 it can",
    ),
    (
        "TRL.*'NoneType' object has no attribute 'apply'",
        "TRL 1.15 computes its loss in a kernel of Triton, which a torch for CPUs has not, without the plugin too",
    ),
    (
        "_enable_peft_forward_hooks",
        "Dynamo of this torch does not trace the context manager that peft enters in each forward: no cell is one graph",
    ),
    (
        r"TRL.*resumed: 0\.00\d+$",
        "TRL trains the adapter of a quantized model in bfloat16; resumed from a checkpoint it is float32, without the plugin too",
    ),
)
"""Why a flow is not right: a pattern in its name and what it says, and the reason."""


@functools.cache
def results() -> Found:
    """What ``make stacks`` has found."""
    found: Found = json.loads(RESULTS.read_text("utf-8"))
    return found


def fragment() -> str:
    """Markdown: what was run on each declared stack, and what is not right there."""
    known = results()
    return "\n".join([*_stacks(known), "", *_graphs(known), "", *_flows(known), "", *_left(known), ""])


def _runs(known: Found) -> Iterator[tuple[str, str, Found]]:
    for name in declared():
        for torch, found in known.get(name, {}).items():
            if "verify" in found:
                yield name, torch, found


def shown_on(patch_id: str) -> set[str]:
    """The series of torch on which a stack, or a GPU, showed the defect and its repair."""
    runs = [*((torch, found["verify"]) for _, torch, found in _runs(results())), gpu.verified()]
    return {
        series(torch)
        for torch, rows in runs
        for row in rows
        if row["id"] == patch_id and row["verdict"] == "ok" and not row["reason"]  # with a reason it is not affected
    }


def _stacks(known: Found) -> Iterator[str]:
    titles = ["stack", "torch", *PACKAGES, "reproducers", "flows right, unpatched", "patched"]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for name, torch, found in _runs(known):
        verdicts = Counter(row["verdict"] for row in found.get("verify", ()))
        said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        flows = found.get("flows", {})
        right = [sum(is_right(flow, answer[how]) for flow, answer in flows.items()) for how in HOW]
        packages = [found["versions"].get(package, "") for package in PACKAGES]
        counts = [f"{each} of {len(flows)}" if flows else "not run" for each in right]
        yield f"| {' | '.join([name, torch, *packages, said, *counts])} |"


def _graphs(known: Found) -> Iterator[str]:
    """The cells of the compiled train step."""
    cells = [flow for flow in FLOWS if ": graphs" in flow]
    yield "A compiled train step, in graphs without the plugin and with it; 1 passes `fullgraph=True` too."
    yield ""
    yield f"| stack | torch | {' | '.join(cell.replace(' graphs,', '') for cell in cells)} |"
    yield "|---" * (len(cells) + 2) + "|"
    for name, torch, found in _runs(known):
        if flows := found.get("flows"):
            counts = (
                {how: flows[cell][how].partition(":")[0] for how in HOW} if cell in flows else {} for cell in cells
            )
            said = [" → ".join(count.values()) for count in counts]
            yield f"| {name} | {torch} | {' | '.join(said)} |"


def _flows(known: Found) -> Iterator[str]:
    """What is not right patched, with what it says and why; and each reproducer that is wrong."""
    rows = list(_not_right(known))
    yield "Not right with the plugin:" if rows else "All flows are right with the plugin."
    if rows:
        yield from (
            "",
            "| stack | torch | flows, or a patch | unpatched | patched | why |",
            "|---|---|---|---|---|---|",
            *rows,
        )


def _not_right(known: Found) -> Iterator[str]:
    for name, torch, found in _runs(known):
        alike: dict[tuple[str, str], dict[str, str]] = {}
        for flow, said in found.get("flows", {}).items():
            if not is_right(flow, said["patched"]):
                alike.setdefault((_shown(said["patched"]), why(flow, said["patched"])), {})[flow] = _shown(
                    said["unpatched"]
                )
        for (patched, reason), flows in alike.items():
            before = "; ".join(map(_cell, dict.fromkeys(flows.values())))
            yield f"| {name} | {torch} | {_titles(flows)} | {before} | {_cell(patched)} | {reason} |"
        for row in found.get("verify", ()):
            if row["verdict"] == "wrong":
                yield f"| {name} | {torch} | `{row['id']}` | | {_cell(row['reason'])} | |"


def _titles(flows: Iterable[str]) -> str:
    """The names of ``flows``, those of both precisions once."""
    kinds: dict[str, list[str]] = {}
    for flow in flows:
        kind, _, title = flow.partition(": ")
        kinds.setdefault(title, []).append(kind)
    return "; ".join(f"{title} ({' and '.join(found)})" for title, found in kinds.items())


def why(flow: str, said: str) -> str:
    """The reason for what a flow says, where it is known; a figure stands for itself otherwise."""
    return next((reason for pattern, reason in REASONS if re.search(pattern, f"{flow}: {said}")), "")


def _shown(said: str) -> str:
    """Without what differs from flow to flow: figures of how far, numbers of graphs."""
    if re.fullmatch(r"0\.00\d+", said):
        return "a difference in rounding"
    said = re.sub(r"(\d\.\d\d)\d+", r"\1", said)
    return re.sub(r"^\d+: no full graph: ", "", said).removeprefix("'").split(" | ")[0].split(". ")[0]


def _left(known: Found) -> Iterator[str]:
    """Defects that are there and out of range, and why."""
    yield "Defects that these releases have and the patch does not repair on them:"
    yield ""
    for name, torch, found in _runs(known):
        ids = [f"`{row['id']}` ({row['reason'].partition(';')[0]})" for row in found["verify"] if LEFT in row["reason"]]
        yield f"- {name} on torch {torch}: {', '.join(ids) or 'none'}"


def _cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""
