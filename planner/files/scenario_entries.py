"""The keys of a scenario file, as plain data; `planner.files.scenario_file` turns them into a `Scenario`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from planner.files.cluster_entries import ClusterEntry
from planner.files.effects_part import EffectsEntry
from planner.files.faults_part import FaultEntry
from planner.files.model_entries import ModelEntry
from planner.files.parsing import STRICT
from planner.files.quantities import Name, NotNegative, Positive, Seed


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """The update rule: its name, learning_rate, momentum and weight_decay, all without unit."""

    name: Literal["sgd", "momentum", "adamw"] = "sgd"
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NotNegative = 0.0

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class TrainingEntry:
    """Batch, update rule, precision and seed."""

    global_batch: Positive
    microbatch: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    optimizer: OptimizerEntry = field(default_factory=OptimizerEntry)
    precision: Literal["fp32"] = "fp32"
    seed: Seed = 0

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class ScenarioEntry:
    """A whole scenario; each part stands here or is the path of a file that holds it."""

    name: Name
    cluster: ClusterEntry | str
    model: ModelEntry | str
    training: TrainingEntry | str
    effects: EffectsEntry | str = field(default_factory=EffectsEntry)
    faults: tuple[FaultEntry, ...] | str = ()

    __pydantic_config__ = STRICT
