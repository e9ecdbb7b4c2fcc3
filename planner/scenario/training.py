"""How a model is trained: batch, precision, the update rule and its learning-rate schedule."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from traces.common.errors import InputError
from traces.common.names import find_by_name

SHAPES = ("constant", "linear", "cosine")

_STEADY = "constant"

# Values kept per parameter by the optimizer, beside the parameter and its gradient.
OPTIMIZER_STATES: Mapping[str, int] = {"sgd": 0, "momentum": 1, "adamw": 2}

# Bytes of one number on the wire. With bf16-mixed the layers compute in bfloat16; parameters, gradients and what passes
# between stages stay float32.
ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "bf16-mixed": 4}


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """A linear warm-up, then a shape; a function of the step alone, so that a run can go on from any step.

    Attributes:
        shape: One of `SHAPES`: what follows the warm-up.
        warmup_steps: The rate rises over so many steps, to its full value in the step after them.
        decay_steps: Steps after the warm-up over which ``linear`` and ``cosine`` fall.
        final_share: Of the full rate, what they fall to and stay at, 0 to 1.

    Raises:
        InputError: There is no such shape, or a value is out of range.
    """

    shape: str = _STEADY
    warmup_steps: int = 0
    decay_steps: int = 0
    final_share: float = 0.0

    def __post_init__(self) -> None:
        find_by_name(self.shape, dict.fromkeys(SHAPES), "shape", where="shape")
        if self.warmup_steps < 0:
            raise InputError(f"{self.warmup_steps} steps of warm-up", "warmup_steps", "0 or more")
        if self.decay_steps < 0 or (self.shape != _STEADY and not self.decay_steps):
            falls = "0 or more" if self.shape == _STEADY else f"shape '{self.shape}' falls over 1 step or more"
            raise InputError(f"{self.decay_steps} steps of decay", "decay_steps", falls)
        if not 0 <= self.final_share <= 1:
            raise InputError(f"a final share of {self.final_share:g}", "final_share", "of the full rate: 0 to 1")

    def factor(self, step: int) -> float:
        """Return the share of the full learning rate in a step, which counts from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.shape == _STEADY:
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / self.decay_steps)
        falling = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final_share + (1 - self.final_share) * falling


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The update rule, an invariant of every adaptation.

    Attributes:
        name: One of `OPTIMIZER_STATES`.
        learning_rate: Step size, without unit.
        momentum: Share of the last update kept, 0 to 1; only for ``momentum``.
        weight_decay: As torch.optim defines it for the optimizer, without unit.
        schedule: How the learning rate changes over the steps.
    """

    name: str = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: LearningRateSchedule = field(default_factory=LearningRateSchedule)


@dataclass(frozen=True, slots=True)
class Training:
    """How the model is trained.

    Attributes:
        global_batch: Samples per update over the whole cluster, an invariant of every adaptation.
        microbatch: Samples per microbatch that strategies without a choice of their own use; 0 leaves it to them.
        optimizer: The update rule.
        precision: What the layers compute in; one of `ELEMENT_BYTES`.
        seed: Of the initial parameters and of the order of the data.
        clip_norm: Gradients of all layers together are scaled down to this Euclidean norm; None leaves them.
        noise_scale: Whether the gradient noise scale is measured in every step, by the devices that share a batch.
    """

    global_batch: int
    microbatch: int = 0
    optimizer: Optimizer = field(default_factory=Optimizer)
    precision: str = "fp32"
    seed: int = 0
    clip_norm: float | None = None
    noise_scale: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of one number on the wire."""
        return ELEMENT_BYTES[self.precision]
