"""A scenario: the cluster, the model, and how it is trained."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from planner.scenario.cluster import Cluster
from planner.scenario.effects import Effects
from planner.scenario.faults import Fault
from planner.scenario.profile import ModelProfile
from planner.scenario.training import LearningRateSchedule

# Values kept per parameter by the optimizer, beside the parameter and its gradient.
OPTIMIZER_STATES: Mapping[str, int] = {"sgd": 0, "momentum": 1, "adamw": 2}

# Bytes of one number on the wire. With bf16-mixed the layers compute in bfloat16; parameters, gradients and what passes
# between stages stay float32.
ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "bf16-mixed": 4}


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
