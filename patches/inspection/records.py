"""What an inspection found, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Layers:
    """Layers of one class that are alike in all that is said here."""

    kind: str
    """Their class."""
    count: int
    bytes: int
    """Of their parameters, buffers and quantization statistics; what several share is counted with the first."""
    parameters: int
    """Numbers that the weights stand for: two to a byte of packed 4-bit weights."""
    quantized: str
    """How: ``"nf4"``, ``"nf4, double"``, ``"int8"``, a class of torchao; empty if they are not."""
    reason: str
    """Why they are not quantized."""
    storage: str
    """The stored dtype."""
    compute: str
    """The dtype of the product; ``"its input's"`` where each input decides."""
    statistics: str
    """``"present"``, ``"missing"``, ``"on meta"`` and the like; empty where none are needed."""
    devices: dict[str, int]
    """How many rest on which device."""
    offloaded: dict[str, int]
    """How many of them accelerate keeps where between calls, and where they run: ``"disk, runs on cuda:0"``."""
    tied: int
    """How many share a parameter with another module."""
    names: tuple[str, ...]
    """The first of them."""


@dataclass(frozen=True)
class Place:
    """A device, "cpu" or "disk", of a model that is offloaded in part."""

    where: str
    layers: int
    quantized: int
    bytes: int
    """Of what lies there between uses, each tensor once."""
    brings: dict[str, int]
    """To which device the layers are brought, and the bytes of one use of each: a forward."""


@dataclass(frozen=True)
class Adapters:
    """Adapters of one kind and name."""

    kind: str
    name: str
    count: int
    """Layers that have one."""
    bytes: int
    dtypes: dict[str, int]
    devices: dict[str, int]
    active: int
    """In how many layers it is switched on."""
    merged: int
    """In how many it is merged into the base weight."""
    trainable: int
    """Tensors of it that train, of ``tensors``."""
    tensors: int


@dataclass(frozen=True)
class Training:
    """What trains, and what of it has no gradient."""

    names: tuple[str, ...]
    outside: tuple[str, ...]
    """Parameters that belong to no adapter."""
    tensors: int
    parameters: int
    bytes: int
    dtypes: dict[str, int]
    gradients: int
    """How many have one now; 0 before the first backward and after ``zero_grad()``."""
    without_gradient: tuple[str, ...]
    """Parameters without a gradient in the last backward or, where an optimizer was given, in any of its steps."""
    modules: dict[str, int]
    """How many modules are in ``"train"`` and in ``"eval"`` mode."""


@dataclass(frozen=True)
class Checkpointing:
    """Gradient checkpointing, where it is on."""

    layers: int
    kind: str
    """``"reentrant"``, ``"non-reentrant"`` or ``"unknown"``."""
    idle: str
    """Why it does nothing; empty if it works."""


@dataclass(frozen=True)
class OptimizerState:
    """The optimizer and the state that it holds."""

    kind: str
    tensors: int
    """Parameters that it updates."""
    stepped: int
    """The ones among them that have a state."""
    in_8_bits: int
    """Those whose state is kept in 8 bits (or fewer)."""
    bits: int | None
    """The requested value; None where it is not known."""
    smallest: int
    """Parameters with fewer elements keep their state in 32 bits."""
    bytes: int
    dtypes: dict[str, int]
    sharded: int
    """Parameters that it updates and that are sharded (DTensor)."""
    outside: int
    """Parameters that it updates and the model does not have."""
    missing: tuple[str, ...]
    """Parameters of the model that train, and that it does not have."""


@dataclass(frozen=True)
class Asked:
    """What the configuration of a model asks of bitsandbytes, and what the model is."""

    precision: str
    """``"4bit"`` or ``"8bit"``."""
    default_list: bool
    """No list of modules to skip was given: heads and tied weights are left as they are."""
    skip: tuple[str, ...]
    """``llm_int8_skip_modules``."""
    skipped: int
    """Linear layers that are not quantized."""
    of: int
    """Linear layers in all."""
    dtypes: dict[str, int]
    """Of the floating-point tensors that are not quantized."""
    compute: str
    """``bnb_4bit_compute_dtype``; empty for INT8."""
    threshold: float | None
    """``llm_int8_threshold``; None for 4 bits."""


@dataclass(frozen=True)
class Problem:
    """One thing that goes wrong with this model."""

    what: str
    where: tuple[str, ...]
    """All that are concerned, by name."""
    remedy: str
    patch: str = ""
    """The patch that is for it, if there is one."""
    status: str = ""
    """Its state in this process."""
    effect: str = ""
    """What the patch does: ``"repairs it"``, or less."""

    @property
    def repaired(self) -> bool:
        """It is one that does not happen here, for its patch is applied."""
        return self.status == "applied" and self.effect == "repairs it"


@dataclass(frozen=True)
class Facts:
    """All of it."""

    model: str
    layers: tuple[Layers, ...]
    adapters: tuple[Adapters, ...]
    training: Training
    checkpointing: Checkpointing | None
    optimizer: OptimizerState | None
    problems: tuple[Problem, ...]
    asked: Asked | None = None
    """None for a model that bitsandbytes did not quantize while loading."""
    places: tuple[Place, ...] = ()
    """What lies where; empty for a model of which nothing is offloaded."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
