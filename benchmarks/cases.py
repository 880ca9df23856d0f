"""What is measured: models of given sizes, ways to train them, and ways to run a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """A Llama with random weights and the batch it gets."""

    layers: int
    hidden: int
    sequence: int
    batch: int = 2
    vocabulary: int = 512


SIZES = {
    "tiny": Size(layers=1, hidden=64, sequence=16),  # for the test that the harness runs
    "small": Size(layers=4, hidden=256, sequence=128),
    "large": Size(layers=4, hidden=2048, sequence=1024, vocabulary=32000),  # on a CUDA device
}


@dataclass(frozen=True)
class Case:
    """One way to fine-tune: LoRA over a frozen quantized model."""

    name: str
    text: str
    bits: int
    checkpointing: bool
    dora: bool = False
    targets: tuple[str, ...] = ()
    """Of LoRA, by name; all linear layers if empty."""


CASES = (
    Case("nf4-checkpoint", "4-bit, checkpointing", bits=4, checkpointing=True),
    Case("nf4-dora-checkpoint", "4-bit DoRA, checkpointing", bits=4, checkpointing=True, dora=True),
    Case("int8", "INT8, threshold 6", bits=8, checkpointing=False),
    Case("int8-checkpoint", "INT8, threshold 6, checkpointing", bits=8, checkpointing=True),
)
MORE = (
    Case("nf4", "4-bit", bits=4, checkpointing=False),
    Case("int8-dora-checkpoint", "INT8 DoRA, threshold 6, checkpointing", bits=8, checkpointing=True, dora=True),
    Case("nf4-dora", "4-bit DoRA", bits=4, checkpointing=False, dora=True),
    Case("int8-dora", "INT8 DoRA, threshold 6", bits=8, checkpointing=False, dora=True),
)
"""Measured where they are named, or all with ``*``."""


@dataclass(frozen=True)
class Configuration:
    """How a case is run. Each has a process of its own."""

    name: str
    patched: bool
    compiled: bool
    folder: str = ""
    """A folder that holds another bitsandbytes; the installed one if empty."""


def configurations(other: str = "", label: str = "") -> tuple[Configuration, ...]:
    """The four of the installed bitsandbytes, and two of that in folder ``other``, if one is given."""
    four = (
        Configuration("unpatched eager", patched=False, compiled=False),
        Configuration("unpatched compiled", patched=False, compiled=True),
        Configuration("patched eager", patched=True, compiled=False),
        Configuration("patched compiled", patched=True, compiled=True),
    )
    if not other:
        return four
    return (
        *four,
        Configuration(f"{label} unpatched eager", patched=False, compiled=False, folder=other),
        Configuration(f"{label} unpatched compiled", patched=False, compiled=True, folder=other),
    )


@dataclass(frozen=True)
class Job:
    """All that a worker is told."""

    case: Case
    size: Size
    configuration: Configuration
    device: str
    dtype: str
    """Of the model and of what 4-bit layers compute in."""
    backend: str
    model: str
    """Folder in which the model lies."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Job:
        parts = {"case": Case, "size": Size, "configuration": Configuration}
        return cls(**{key: parts[key](**value) if key in parts else value for key, value in data.items()})
