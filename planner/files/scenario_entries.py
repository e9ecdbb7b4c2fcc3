"""The keys of a scenario file, as plain data; `planner.files.scenario_file` turns them into a `Scenario`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from planner.files.cluster_entries import ClusterEntry
from planner.files.effects_part import EffectsEntry
from planner.files.faults import FaultEntry
from planner.files.model_entries import ModelEntry
from planner.files.parsing import STRICT
from planner.files.quantities import Name, NotNegative, Number, Positive, Seed
from planner.scenario.training import SHAPES


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """How the learning rate changes: a warm-up to its full value, then ``constant``, ``linear`` or ``cosine``.

    Attributes:
        shape: What follows the warm-up.
        warmup_steps: Over which it rises.
        decay_steps: Over which ``linear`` and ``cosine`` fall, after the warm-up.
        final_share: Of the full rate, what they fall to and stay at.
    """

    shape: Annotated[str, WithJsonSchema({"enum": list(SHAPES)})] = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0
    final_share: Number = 0.0

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """The update rule: its name, learning_rate, momentum and weight_decay, without unit; and the rate's schedule."""

    name: Literal["sgd", "momentum", "adamw"] = "sgd"
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NotNegative = 0.0
    schedule: ScheduleEntry = field(default_factory=ScheduleEntry)

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class TrainingEntry:
    """Batch, update rule, precision and seed.

    Attributes:
        global_batch: Samples per update over the whole cluster.
        microbatch: Samples per microbatch, for strategies without a choice of their own.
        optimizer: The update rule.
        precision: What the layers compute in.
        seed: Of the initial parameters and of the order of the data.
        clip_norm: Largest norm of the gradients of all layers together; none if absent.
        noise_scale: Whether the gradient noise scale is measured.
    """

    global_batch: Positive
    microbatch: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    optimizer: OptimizerEntry = field(default_factory=OptimizerEntry)
    precision: Literal["fp32", "bf16-mixed"] = "fp32"
    seed: Seed = 0
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    noise_scale: bool = False

    __pydantic_config__ = STRICT


# Samples that a region has, of all that are trained on.
StoredSamples = Annotated[int, Field(ge=1, le=1_000_000_000_000)]


@dataclass(frozen=True, kw_only=True)
class ScenarioEntry:
    """A whole scenario; each part stands here or is the path of a file that holds it.

    ``data`` has the samples that each region stores and trains on; without it data are everywhere.
    """

    name: Name
    cluster: ClusterEntry | str
    model: ModelEntry | str
    training: TrainingEntry | str
    effects: EffectsEntry | str = field(default_factory=EffectsEntry)
    faults: tuple[FaultEntry, ...] | str = ()
    data: dict[str, StoredSamples] | str = field(default_factory=dict)

    __pydantic_config__ = STRICT
