"""A scenario: the cluster, the model, how it is trained, and what happens meanwhile."""

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
    """The model's own code, for runs with real compute.

    Attributes:
        path: Python file with a function ``build``.
        arguments: Keyword arguments for ``build``.
    """

    path: Path
    arguments: Mapping[str, int | float | str | bool]


@dataclass(frozen=True, eq=False)
class Scenario:
    """Everything that a plan is made for, and what happens while it runs.

    Attributes:
        name: Name of the scenario, for people.
        cluster: Devices and links.
        model: Cost of the model's layers.
        training: Batch, update rule and numerics.
        code: Code of the model, for runs with real compute; None if there is none.
        effects: Effects on devices and networks beyond the profile and the links' nominal values.
        faults: Departures, hangs and outages during the run.
        data: Region to the number of samples stored there, which are trained on there; empty if every region has all.
    """

    name: str
    cluster: Cluster
    model: ModelProfile
    training: Training
    code: ModelCode | None = None
    effects: Effects = field(default_factory=Effects)
    faults: tuple[Fault, ...] = ()
    data: Mapping[str, int] = field(default_factory=dict)
