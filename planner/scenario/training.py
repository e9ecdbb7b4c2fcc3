"""How a model is trained: batch, precision, the update rule and its learning rate, and on which data.

The executor reads the data, planner and simulator do not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from planner.scenario.convergence import LossLaw
from traces.common.errors import InputError, find_by_name

SHAPES = ("constant", "linear", "cosine")

# Rules by which the learning rate follows the global batch; see `rate_factor`.
RATE_RULES = ("adascale", "sqrt", "linear")

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

# Formats of activations and their gradients on the way between stages in different regions: unchanged, bfloat16, or
# 8-bit integers with one float32 scale for each sample.
COMPRESSIONS = ("none", "bf16", "int8")

# The precision of training, and of measured costs of models, where a file states none.
DEFAULT_PRECISION = "fp32"


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """The learning rate over the steps: a linear warm-up, followed by one of `SHAPES`.

    The rate depends on the progress alone, so that a run can continue from any step. A step of the scenario's global
    batch is progress by one step, whatever batches a policy chooses.

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

    def factor(self, step: float) -> float:
        """Return the share of the full learning rate in a step; steps count from 0, and may be fractions."""
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

    Raises:
        InputError: The update rule is unknown.
    """

    name: str = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: LearningRateSchedule = field(default_factory=LearningRateSchedule)

    def __post_init__(self) -> None:
        find_by_name(self.name, OPTIMIZER_STATES, "optimizer", where="optimizer")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits within which a plan or a policy chooses the global batch.

    Attributes:
        smallest: Least global batch, samples.
        largest: Largest global batch, samples.
        rate_rule: Rule by which the learning rate follows the batch, one of `RATE_RULES`.
        noise_scale: Points (samples trained, gradient noise scale in samples) of the noise scale that is assumed in
            steps in which none is measured, such as simulated ones; in order of the samples, empty if it is unknown.

    Raises:
        InputError: The rule is unknown, the limits are reversed, or a point is not above zero or not in order.
    """

    smallest: int
    largest: int
    rate_rule: str
    noise_scale: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        find_by_name(self.rate_rule, dict.fromkeys(RATE_RULES), "rule", where="learning_rate")
        if not 1 <= self.smallest <= self.largest:
            raise InputError(
                f"no batch lies between {self.smallest} and {self.largest} samples", "to", "give at least 'from'"
            )
        counts = [count for count, _ in self.noise_scale]
        if any(later <= earlier for earlier, later in pairwise(counts)):
            raise InputError("the points are not in order", "noise_scale", "give increasing numbers of samples")

    def assumed_noise_scale(self, samples: float) -> float | None:
        """Return the assumed noise scale after ``samples`` samples of training, in samples; None if it is unknown.

        It is linear between two points, and constant before the first and after the last one.
        """
        if not self.noise_scale:
            return None
        counts, scales = zip(*self.noise_scale, strict=True)
        return float(np.interp(samples, counts, scales))


def statistical_efficiency(batch: float, first_batch: float, noise_scale: float) -> float:
    """Return the progress per sample in a batch relative to that in the first batch, a ratio without unit.

    Args:
        batch: Global batch B, samples.
        first_batch: First global batch B_0, samples.
        noise_scale: Gradient noise scale N, samples; may be infinite.
    """
    if math.isinf(noise_scale):
        return 1.0
    return (first_batch + noise_scale) / (batch + noise_scale)


def rate_factor(rule: str, batch: int, first_batch: int, noise_scale: float | None) -> float:
    """Return the factor on the learning rate in a global batch B instead of the first one, B_0, both in samples.

    It is B / B_0 by the rule ``linear``, its square root by ``sqrt``, and AdaScale's gain (arXiv 2007.05105), the
    progress of the step in steps of B_0 samples, by ``adascale``: between 1 and B / B_0 if B is the larger one. Only
    ``adascale`` needs ``noise_scale``, the gradient noise scale in samples, and not if the batches are equal.
    """
    scale = batch / first_batch
    if rule == "linear" or scale == 1:
        return scale
    if rule == "sqrt":
        return math.sqrt(scale)
    assert noise_scale is not None, "plans are checked for it"
    return scale * statistical_efficiency(batch, first_batch, noise_scale)


# Types of the numbers in files of tokens.
TOKEN_TYPES = ("uint16", "uint32")


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """A folder of ``.bin`` files, each of token numbers and nothing else.

    Attributes:
        path: Folder of the files, which are read in the order of their names.
        length: Number of tokens in a sample.
        dtype: Type of a token number, one of `TOKEN_TYPES`.
    """

    path: Path
    length: int
    dtype: str = "uint16"


@dataclass(frozen=True, slots=True)
class DatasetCode:
    """The user's own data set.

    Attributes:
        path: Python file with a function ``build`` that returns a torch ``Dataset`` or ``IterableDataset``.
        arguments: Keyword arguments for ``build``.
    """

    path: Path
    arguments: Mapping[str, int | float | str | bool]


@dataclass(frozen=True, slots=True)
class SavedDataset:
    """A folder that ``save_to_disk`` of Hugging Face's ``datasets`` has written.

    Attributes:
        path: Folder of the data set.
        inputs: Name of the column of the inputs.
        targets: Name of the column of the targets, which may be that of the inputs.
    """

    path: Path
    inputs: str
    targets: str


DataSource = TokenFiles | DatasetCode | SavedDataset


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training data that a scenario names.

    Attributes:
        source: What is read, which must be at the same path on every host.
        workers: Number of processes of each rank that read ahead; with 0 the rank reads when it needs the samples.
    """

    source: DataSource
    workers: int = 0


@dataclass(frozen=True, slots=True)
class Training:
    """The batch, the update rule and the numerics of training.

    Attributes:
        global_batch: Samples per update, summed over all pipelines; with ``batch``, those for which the learning rate
            is given, and with which strategies plan.
        microbatch: Samples per microbatch, for strategies that do not choose the size themselves; 0 if not given.
        precision: Number formats of training, one of `PRECISIONS`.
        seed: Seed of the initial parameters and of the order of the data.
        clip_norm: Limit on the Euclidean norm of the gradients of all layers together; None for no limit.
        noise_scale: Whether the devices that share a batch measure the gradient noise scale in every step.
        data: The data for runs with real compute; None if the model has its own.
        batch: Limits of the global batch; None if it is always ``global_batch``.
        bytes_per_parameter: Bytes that plans count on a device for each parameter with all of its training state; None
            for those of ``framework``. The tensors of a run do not depend on them.
        framework: The framework whose rule gives these bytes, one of `planner.cost.parameter_memory.FRAMEWORKS`.
        convergence: How the loss of this task falls by methods of synchronisation; None if it was never measured.
        compressions: Formats, of `COMPRESSIONS`, in which strategy and policy ``auto`` may let messages
            between stages in different regions be sent.

    Raises:
        InputError: The precision or a compression is unknown, no compression is given or one twice, or a step has no
            samples.
    """

    global_batch: int
    microbatch: int = 0
    optimizer: Optimizer = field(default_factory=Optimizer)
    precision: str = DEFAULT_PRECISION
    seed: int = 0
    clip_norm: float | None = None
    noise_scale: bool = False
    data: TrainingData | None = None
    batch: BatchLimits | None = None
    bytes_per_parameter: float | None = None
    framework: str = "torch"
    convergence: LossLaw | None = None
    compressions: tuple[str, ...] = ("none",)

    def __post_init__(self) -> None:
        find_by_name(self.precision, PRECISIONS, "precision", where="precision")
        for name in self.compressions:
            find_by_name(name, dict.fromkeys(COMPRESSIONS), "compression", where="compressions")
        if not 0 < len(self.compressions) == len(set(self.compressions)):
            given = ", ".join(self.compressions) or "nothing"
            raise InputError(f"{given} is no list of formats", "compressions", "give at least one, and none twice")
        if self.global_batch < 1:
            raise InputError(f"{self.global_batch} samples are no batch", "global_batch", "give 1 or more")

    @property
    def largest_batch(self) -> int:
        """Largest global batch that a plan may have, samples."""
        return self.global_batch if self.batch is None else self.batch.largest

    @property
    def measures_noise(self) -> bool:
        """Whether devices that share a batch measure the gradient noise scale; an adaptive batch needs it too."""
        return self.noise_scale or self.batch is not None

    def learning_rate(self, samples_before: int, batch: int, noise_scale: float | None) -> float:
        """Return the learning rate of a step.

        Args:
            samples_before: Samples of all steps before this one.
            batch: Global batch of the step, samples.
            noise_scale: Gradient noise scale for which the batch was chosen, samples; see `rate_factor`.
        """
        rate = self.optimizer.learning_rate * self.optimizer.schedule.factor(samples_before / self.global_batch)
        if self.batch is None:
            return rate
        return rate * rate_factor(self.batch.rate_rule, batch, self.global_batch, noise_scale)

    @property
    def formats(self) -> Precision:
        """The number formats of the precision."""
        return PRECISIONS[self.precision]
