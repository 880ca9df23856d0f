"""The findings of an inspection, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layers:
    """Layers that have the same class, quantization, dtypes and statistics."""

    kind: str
    """Their class."""
    count: int
    bytes: int
    """Of parameters, buffers and quantization statistics; a shared tensor is counted with its first layer."""
    parameters: int
    """Numbers that the weights stand for: two to a byte of packed 4-bit weights."""
    quantized: str
    """``"nf4"``, ``"nf4, double"``, ``"int8"``, a class of torchao; empty if they are not quantized."""
    reason: str
    """Why they are not quantized."""
    storage: str
    """The dtype in memory."""
    compute: str
    """The dtype of the product; ``"its input's"`` where each input decides."""
    statistics: str
    """``"present"``, ``"missing"``, ``"on meta"`` and the like; empty where none are needed."""
    devices: dict[str, int]
    """The number of layers on each device, without offloaded ones."""
    offloaded: dict[str, int]
    """The number of layers that accelerate keeps in each place between calls: ``"disk, runs on cuda:0"``."""
    tied: int
    """The number of layers that share a parameter with another module."""
    names: tuple[str, ...]
    """The first of them."""


@dataclass(frozen=True)
class Place:
    """A device, "cpu" or "disk", of a model that is offloaded in part."""

    where: str
    layers: int
    quantized: int
    bytes: int
    """Of the tensors that lie there between uses, each counted once."""
    brings: dict[str, int]
    """The bytes that a forward copies from there to each device."""


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
    """Layers in which it is switched on."""
    merged: int
    """Layers in which it is merged into the base weight."""
    trainable: int
    """Tensors that require grad, of ``tensors``."""
    tensors: int


@dataclass(frozen=True)
class Training:
    """The parameters that train, and the ones among them without a gradient."""

    names: tuple[str, ...]
    outside: tuple[str, ...]
    """Parameters that belong to no adapter."""
    tensors: int
    parameters: int
    bytes: int
    dtypes: dict[str, int]
    gradients: int
    """Parameters that have one now; 0 before the first backward and after ``zero_grad()``."""
    without_gradient: tuple[str, ...]
    """Parameters without a gradient in the last backward or, where an optimizer was given, in any of its steps."""
    modules: dict[str, int]
    """The number of modules in ``"train"`` and in ``"eval"`` mode."""


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
    """Parameters that have a state."""
    in_8_bits: int
    """Parameters whose state has 8 bits or fewer."""
    bits: int | None
    """The requested value; None if unknown."""
    smallest: int
    """Parameters with fewer elements keep their state in 32 bits."""
    bytes: int
    dtypes: dict[str, int]
    sharded: int
    """Sharded parameters (DTensor) that it updates."""
    outside: int
    """Parameters that it updates and the model does not have."""
    missing: tuple[str, ...]
    """Parameters of the model that train, and that it does not have."""


@dataclass(frozen=True)
class Asked:
    """The configuration with which bitsandbytes quantized the model, and the layers that are quantized."""

    precision: str
    """``"4bit"`` or ``"8bit"``."""
    default_list: bool
    """No list of modules to skip was given: heads and tied weights are left as they are."""
    skip: tuple[str, ...]
    """``llm_int8_skip_modules``."""
    skipped: int
    """Linear layers that are not quantized, of ``of``."""
    of: int
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
    """The names of all layers or parameters that it concerns."""
    remedy: str
    patch: str = ""
    """The patch that is for it, if there is one."""
    status: str = ""
    """The status of the patch in this process."""
    effect: str = ""
    """The effect of the patch: ``"repairs it"``, or less."""

    @property
    def repaired(self) -> bool:
        """Whether it does not happen here, because its patch is applied."""
        return self.status == "applied" and self.effect == "repairs it"


@dataclass(frozen=True)
class Facts:
    """All findings about a model."""

    model: str
    layers: tuple[Layers, ...]
    adapters: tuple[Adapters, ...]
    training: Training
    checkpointing: Checkpointing | None
    optimizer: OptimizerState | None
    problems: tuple[Problem, ...]
    asked: Asked | None
    """None for a model that bitsandbytes did not quantize while loading."""
    places: tuple[Place, ...]
    """Empty for a model of which nothing is offloaded."""
