"""A plan: which device computes which layers of which samples, in which order. Plain data."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Replica:
    """One device of a stage.

    Attributes:
        device: Its name in the cluster.
        share: Its part of every microbatch, relative to the shares of the stage's other replicas.
    """

    device: str
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous range of layers on one or more devices.

    Attributes:
        first_layer: Index of its first layer.
        end_layer: Index after its last layer.
        replicas: The devices that hold these layers; each takes an interval of every microbatch's samples.
        in_flight: Microbatches that may be between their forward and their backward here.
    """

    first_layer: int
    end_layer: int
    replicas: tuple[Replica, ...]
    in_flight: int

    def intervals(self, samples: int) -> tuple[tuple[int, int], ...]:
        """Return the (first, end) samples of a microbatch of ``samples`` that each replica takes.

        Bounds are the rounded cumulative shares, so that neighbours never overlap or leave a gap.
        """
        total = sum(replica.share for replica in self.replicas)
        bounds = [0, *(round(samples * part / total) for part in accumulate(r.share for r in self.replicas))]
        return tuple(pairwise(bounds))

    def most_samples(self, microbatches: Iterable[int]) -> tuple[int, ...]:
        """Return the most samples of any one microbatch that each replica takes.

        Not those of the largest microbatch: rounding can give a replica more of a smaller one.
        """
        widths = ([end - first for first, end in self.intervals(samples)] for samples in microbatches)
        return tuple(max(column) for column in zip(*widths, strict=True))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order, and the microbatches of one step that pass through them.

    Attributes:
        stages: Together they cover every layer once.
        microbatches: Samples of each microbatch.
    """

    stages: tuple[Stage, ...]
    microbatches: tuple[int, ...]

    @property
    def samples(self) -> int:
        """Samples per step."""
        return sum(self.microbatches)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a scenario is trained; the same plan is simulated and executed.

    Attributes:
        scenario: Name of the scenario it was made for.
        model: Name of the model.
        strategy: What made it.
        schedule: Name of the order of actions, one of `planner.schedules.SCHEDULES`.
        pipelines: Each takes its own samples of the global batch; gradients are summed over them.
        version: Of this format.
    """

    scenario: str
    model: str
    strategy: str
    schedule: str
    pipelines: tuple[Pipeline, ...]
    version: int = SCHEMA_VERSION

    @property
    def global_batch(self) -> int:
        """Samples per update over all pipelines."""
        return sum(pipeline.samples for pipeline in self.pipelines)

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices in the order of pipelines, stages and replicas: the rank order of an execution."""
        return tuple(
            replica.device for pipeline in self.pipelines for stage in pipeline.stages for replica in stage.replicas
        )

    def with_microbatches(self, pipeline: int, microbatches: tuple[int, ...], in_flight: tuple[int, ...]) -> "Plan":
        """Return the plan with other microbatch sizes and per-stage depths in one pipeline."""
        old = self.pipelines[pipeline]
        stages = tuple(replace(stage, in_flight=depth) for stage, depth in zip(old.stages, in_flight, strict=True))
        new = Pipeline(stages, microbatches)
        pipelines = (*self.pipelines[:pipeline], new, *self.pipelines[pipeline + 1 :])
        return replace(self, pipelines=pipelines)
