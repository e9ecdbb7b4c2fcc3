"""Skeletons of plans: alike pipelines side by side, without names of devices."""

from dataclasses import dataclass

from planner.systems.auto.candidates.pools import DeviceClass


@dataclass(frozen=True, slots=True)
class SkeletonStage:
    """Layers on a part of a pool, in every one of the pipelines.

    Attributes:
        pool: Where.
        degree: Devices that share each layer.
        width: Replicas in a pipeline.
        first_layer: Index of the first.
        end_layer: Index after the last.
        recompute: Whether only its input is kept.
    """

    pool: DeviceClass
    degree: int
    width: int
    first_layer: int
    end_layer: int
    recompute: bool


@dataclass(frozen=True, slots=True)
class PipelineTemplate:
    """Alike pipelines.

    Attributes:
        pipelines: How many.
        samples: Of all of them in a step.
        microbatch: Samples.
        stages: Of each pipeline.
        bottleneck_s: Time of the slowest stage or link for a microbatch, seconds.
        round_trip_s: Time of one microbatch there and back, seconds.
        sum_s: Time of the slowest sum of gradients, seconds.
    """

    pipelines: int
    samples: int
    microbatch: int
    stages: tuple[SkeletonStage, ...]
    bottleneck_s: float
    round_trip_s: float
    sum_s: float

    @property
    def chain_s(self) -> float:
        """Seconds of a step without sums of gradients; microbatches that came out smaller take less in proportion."""
        share = -(-self.samples // self.pipelines)
        microbatches = -(-share // self.microbatch)
        filled = -(-share // microbatches) / self.microbatch
        return ((microbatches - 1) * self.bottleneck_s + self.round_trip_s) * filled

    @property
    def step_s(self) -> float:
        """Seconds of a step by the closed form."""
        return self.chain_s + self.sum_s
