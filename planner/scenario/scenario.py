"""A scenario: the cluster, the model, and how it is trained."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from planner.scenario.cluster import Cluster
from planner.scenario.effects import Effects
from planner.scenario.faults import Fault
from planner.scenario.profile import ModelProfile
from planner.scenario.training import Training


@dataclass(frozen=True, slots=True)
class ModelCode:
    """Where the model's own code is, for runs with real compute.

    Attributes:
        path: A Python file with a function ``build``.
        arguments: What ``build`` is called with.
    """

    path: Path
    arguments: Mapping[str, int | float | str | bool]


@dataclass(frozen=True, eq=False)
class Scenario:
    """Everything that a plan is made for, and what happens while it runs.

    Attributes:
        name: For people.
        cluster: Devices and links.
        model: What its layers cost.
        training: Batch and update rule.
        code: Of the model, for runs with real compute.
        effects: What devices and networks do beside what the profile and the links say.
        faults: What fails.
        data: Region to the samples that are stored there and trained on there; empty if data are everywhere.
    """

    name: str
    cluster: Cluster
    model: ModelProfile
    training: Training
    code: ModelCode | None = None
    effects: Effects = field(default_factory=Effects)
    faults: tuple[Fault, ...] = ()
    data: Mapping[str, int] = field(default_factory=dict)
