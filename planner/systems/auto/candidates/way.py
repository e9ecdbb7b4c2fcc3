"""A way to use a pool of devices."""

from dataclasses import dataclass

from planner.systems.auto.candidates.pools import DeviceClass


@dataclass(frozen=True, eq=False, slots=True)
class StageOption:
    """A way to use a pool.

    Attributes:
        pool: The pool.
        degree: Devices that share each layer by tensor parallelism.
        width: Replicas of each stage.
        recompute: Whether stages keep only their input.
        most_stages: As many as one pipeline's part of the pool has devices for.
    """

    pool: DeviceClass
    degree: int
    width: int
    recompute: bool
    most_stages: int
