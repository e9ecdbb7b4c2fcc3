"""How a model is trained: batch, precision, the update rule and its learning-rate schedule."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.scenario.data import TrainingData
from traces.common.errors import InputError, find_by_name

SHAPES = ("constant", "linear", "cosine")

_CONSTANT = "constant"

# Numbers that the optimizer stores per parameter in addition to the parameter and its gradient.
OPTIMIZER_STATES: Mapping[str, int] = {"sgd": 0, "momentum": 1, "adamw": 2}

# Bytes of a float32 number. Parameters, their gradients and the optimizer's state are float32 in every precision.
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of training, in which parameters, gradients and optimizer state are always float32.

    Attributes:
        arithmetic: Format in which matrix products are computed, a key of `DeviceKind.peak_flops`.
        number_bytes: Bytes of a number in saved activations and in messages between stages.
        copy_bytes: Bytes per parameter of the copy of the parameters in the format of the matrix products, which a
            device holds from a step's first forward to its last backward; 0 if the parameters are used as they are.
    """

    arithmetic: str
    number_bytes: int
    copy_bytes: int

    def converted_bytes(self, float32_bytes: int) -> int:
        """Return the size of activations or messages in this precision, given their size as float32 numbers."""
        return float32_bytes * self.number_bytes // FLOAT32_BYTES


# Half precisions are mixed, as torch's autocast is: matrix products and activations have 2 bytes a number. With fp8 (as
# NVIDIA's Transformer Engine computes it) the factors of matrix products have 1 byte, each held with its transpose.
PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision("fp32", 4, 0),
    "tf32": Precision("tf32", 4, 0),
    "bf16": Precision("bf16", 2, 2),
    "fp16": Precision("fp16", 2, 2),
    "fp8": Precision("fp8", 2, 2),
}

# The precision of training, and of measured costs of models, where a file states none.
DEFAULT_PRECISION = "fp32"


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """The learning rate over the steps: a linear warm-up, followed by one of `SHAPES`.

    The rate depends on the index of the step alone, so that a run can continue from any step.

    Attributes:
        shape: Shape of the learning rate after the warm-up, one of `SHAPES`.
        warmup_steps: Number of steps with a rising rate; the next step has the full rate.
        decay_steps: Number of steps after the warm-up over which ``linear`` and ``cosine`` fall.
        final_share: Share of the full rate, 0 to 1, that ``linear`` and ``cosine`` reach and keep.

    Raises:
        InputError: The shape is unknown, or a value is out of range.
    """

    shape: str = _CONSTANT
    warmup_steps: int = 0
    decay_steps: int = 0
    final_share: float = 0.0

    def __post_init__(self) -> None:
        find_by_name(self.shape, dict.fromkeys(SHAPES), "shape", where="shape")
        if self.warmup_steps < 0:
            raise InputError(f"{self.warmup_steps} steps of warm-up are not allowed", "warmup_steps", "give 0 or more")
        if self.decay_steps < 0 or (self.shape != _CONSTANT and not self.decay_steps):
            valid = "give 0 or more" if self.shape == _CONSTANT else f"shape '{self.shape}' falls over 1 step or more"
            raise InputError(f"{self.decay_steps} steps of decay are not allowed", "decay_steps", valid)
        if not 0 <= self.final_share <= 1:
            raise InputError(
                f"a final share of {self.final_share:g} is not allowed", "final_share", "give 0 to 1 of the full rate"
            )

    def factor(self, step: int) -> float:
        """Return the share of the full learning rate in a step; steps count from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.shape == _CONSTANT:
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / self.decay_steps)
        falling = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final_share + (1 - self.final_share) * falling


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The update rule, which stays the same during a run.

    Attributes:
        name: Name of the update rule, one of `OPTIMIZER_STATES`.
        learning_rate: Step size, without unit.
        momentum: Share of the previous update that is added to the next, 0 to 1; only for ``momentum``.
        weight_decay: Weight decay as torch.optim defines it for this optimizer, without unit.
        schedule: Factor on ``learning_rate`` over the steps.
    """

    name: str = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: LearningRateSchedule = field(default_factory=LearningRateSchedule)


@dataclass(frozen=True, slots=True)
class Training:
    """The batch, the update rule and the numerics of training.

    Attributes:
        global_batch: Samples per update, summed over all pipelines.
        microbatch: Samples per microbatch, for strategies that do not choose the size themselves; 0 if not given.
        precision: Number formats of training, one of `PRECISIONS`.
        seed: Seed of the initial parameters and of the order of the data.
        clip_norm: Limit on the Euclidean norm of the gradients of all layers together; None for no limit.
        noise_scale: Whether the devices that share a batch measure the gradient noise scale in every step.
        data: The data for runs with real compute; None if the model has its own.
    """

    global_batch: int
    microbatch: int = 0
    optimizer: Optimizer = field(default_factory=Optimizer)
    precision: str = DEFAULT_PRECISION
    seed: int = 0
    clip_norm: float | None = None
    noise_scale: bool = False
    data: TrainingData | None = None

    @property
    def formats(self) -> Precision:
        """The number formats of the precision."""
        return PRECISIONS[self.precision]
