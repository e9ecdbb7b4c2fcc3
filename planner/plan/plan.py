"""A plan: which device computes which layers of which samples, in which order, as plain data."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise

from planner.plan.actions import Action
from planner.scenario.scenario import Scenario

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class Replica:
    """One device of a stage, or several of one host that share each layer by tensor parallelism.

    Attributes:
        device: Name of the device, which sends and receives for its partners.
        share: Part of every microbatch that it takes, relative to the shares of the stage's other replicas.
        partners: Names of the other devices of the tensor-parallel group.
    """

    device: str
    share: float = 1.0
    partners: tuple[str, ...] = ()

    @property
    def tensor_parallel(self) -> int:
        """Number of devices that share each layer."""
        return 1 + len(self.partners)

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices of the group, the one that sends and receives first."""
        return (self.device, *self.partners)


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous range of layers on one or more devices.

    Attributes:
        first_layer: Index of its first layer.
        end_layer: Index after its last layer.
        replicas: Devices that hold these layers; each takes an interval of every microbatch's samples.
        in_flight: Most microbatches between their forward and their backward in this stage.
        recompute: Whether a forward saves only the stage's inputs, from which the backward computes the rest again.
    """

    first_layer: int
    end_layer: int
    replicas: tuple[Replica, ...]
    in_flight: int
    recompute: bool = False

    @property
    def layers(self) -> range:
        """Indices of its layers."""
        return range(self.first_layer, self.end_layer)

    def intervals(self, samples: int) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) samples of a microbatch of ``samples`` that each replica takes.

        Bounds are the rounded cumulative shares, so that neighbours never overlap or leave a gap.
        """
        total = sum(replica.share for replica in self.replicas)
        bounds = [0, *(round(samples * part / total) for part in accumulate(r.share for r in self.replicas))]
        return tuple(pairwise(bounds))

    def most_samples(self, microbatches: Iterable[int]) -> tuple[int, ...]:
        """Return the most samples that each replica takes of any one microbatch.

        This need not be the largest microbatch: rounding can give a replica more of a smaller one.
        """
        widths = ([stop - start for start, stop in self.intervals(samples)] for samples in set(microbatches))
        return tuple(max(column) for column in zip(*widths, strict=True))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order, and the microbatches of one step that pass through them.

    Attributes:
        stages: Stages in the order of the forward, which cover every layer once.
        microbatches: Number of samples of each microbatch.
        orders: Actions of each worker, in the order of `workers`, for the schedule `EXPLICIT`; empty for others.
    """

    stages: tuple[Stage, ...]
    microbatches: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...] = ()

    @property
    def workers(self) -> tuple[int, ...]:
        """Number of the worker that holds each stage; stages on the same devices have one worker, numbered in order."""
        seen: dict[tuple[str, ...], int] = {}
        return tuple(
            seen.setdefault(tuple(replica.device for replica in stage.replicas), len(seen)) for stage in self.stages
        )

    @property
    def samples(self) -> int:
        """Samples per step."""
        return sum(self.microbatches)

    def with_depths(self, depths: Iterable[int]) -> "Pipeline":
        """Return the pipeline with so many microbatches in flight at its stages."""
        stages = tuple(replace(stage, in_flight=depth) for stage, depth in zip(self.stages, depths, strict=True))
        return replace(self, stages=stages)


@dataclass(frozen=True, slots=True)
class Synchronisation:
    """How pipelines keep their copies of a layer consistent.

    Attributes:
        method: Method of exchange. ``allreduce`` sums gradients at the end of every step; ``asgd`` sends every step's
            gradients to the other pipelines, which apply them on arrival and never wait; ``asgd-ga`` sends the sum of
            ``interval_steps`` steps (Cloudless-Training, arXiv 2303.05330); ``ma`` sends parameters every
            ``interval_steps`` steps, which the receivers average.
        algorithm: Algorithm of all-reduce: ``ring``, ``tree`` or ``hierarchical`` (inside regions first).
        interval_steps: Steps between two exchanges; 1 for ``allreduce`` and ``asgd``.
        staleness_bound: Most steps that a pipeline may run ahead of the last update received from the slowest other
            one, beyond the ``interval_steps`` between updates; None for no bound.
        bucket_bytes: Bytes of a gradient bucket: ``allreduce`` starts during backward, as soon as the gradients of so
            many bytes of whole layers are complete; 0 for sums that start after a device's last action.
    """

    method: str = "allreduce"
    algorithm: str = "ring"
    interval_steps: int = 1
    staleness_bound: int | None = None
    bucket_bytes: int = 0


METHODS = ("allreduce", "asgd", "asgd-ga", "ma")
ALGORITHMS = ("ring", "tree", "hierarchical")

# Formats of transfers between stages in different regions: unchanged, bfloat16, or 8-bit integers with a float32 scale
# for each sample.
COMPRESSIONS = ("none", "bf16", "int8")

# The schedule of a plan that carries its own orders.
EXPLICIT = "explicit"

# Scheduled: actions in the order of the schedule. Dynamic: each device takes the best action that is ready.
ORDERS = ("scheduled", "dynamic")


@dataclass(frozen=True)
class Plan:
    """How a scenario is trained; the same plan is simulated and executed.

    Attributes:
        scenario: Name of the scenario that the plan was made for.
        model: Name of the model.
        strategy: Name of the strategy that made the plan.
        schedule: Name of the schedule, one of `planner.schedules.SCHEDULES` or `EXPLICIT`.
        pipelines: Pipelines, each with its own samples of the global batch; gradients are summed over them.
        order: Order of actions, one of `ORDERS`. With ``dynamic`` the schedule only defines whether backward is split.
        synchronisation: Synchronisation of layers that several devices hold.
        connections: Number of TCP connections between each two devices in different regions.
        compression: Format of transfers between regions, one of `COMPRESSIONS`.
        version: Version of the file format.
    """

    scenario: str
    model: str
    strategy: str
    schedule: str
    pipelines: tuple[Pipeline, ...]
    order: str = "scheduled"
    synchronisation: Synchronisation = field(default_factory=Synchronisation)
    connections: int = 1
    compression: str = "none"
    version: int = SCHEMA_VERSION

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Caches of compiled steps hash their plan; one with explicit orders has thousands of actions.
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def global_batch(self) -> int:
        """Samples per update over all pipelines."""
        return sum(pipeline.samples for pipeline in self.pipelines)

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices in the order of pipelines, stages and replicas, each once: the rank order of an execution."""
        replicas = (replica for pipeline in self.pipelines for stage in pipeline.stages for replica in stage.replicas)
        return tuple(dict.fromkeys(device for replica in replicas for device in replica.devices))

    @property
    def without_overlap(self) -> "Plan":
        """The plan without overlap: gradient sums start after a device's last action."""
        if not self.synchronisation.bucket_bytes:
            return self
        return replace(self, synchronisation=replace(self.synchronisation, bucket_bytes=0))

    def with_microbatches(self, pipeline: int, microbatches: tuple[int, ...], in_flight: tuple[int, ...]) -> "Plan":
        """Return the plan with other microbatch sizes and per-stage depths in one pipeline."""
        new = replace(self.pipelines[pipeline].with_depths(in_flight), microbatches=microbatches)
        pipelines = (*self.pipelines[:pipeline], new, *self.pipelines[pipeline + 1 :])
        return replace(self, pipelines=pipelines)


def equivalent_pipelines(plan: Plan, scenario: Scenario) -> list[list[int]]:
    """Return the indices of pipelines in groups of equal layers, shares, microbatches, device kinds and regions."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, pipeline in enumerate(plan.pipelines):
        groups[_key(pipeline, scenario)].append(index)
    return list(groups.values())


def representatives(plan: Plan, scenario: Scenario) -> Plan:
    """Return the plan with one pipeline of each group and without gradient sums, which would be over fewer."""
    first = tuple(plan.pipelines[group[0]] for group in equivalent_pipelines(plan, scenario))
    return replace(plan, pipelines=first, synchronisation=replace(plan.synchronisation, method="asgd", bucket_bytes=0))


def _key(pipeline: Pipeline, scenario: Scenario) -> Hashable:
    devices = scenario.cluster.by_name
    stages = tuple(
        (
            stage.first_layer,
            stage.end_layer,
            stage.recompute,
            tuple(
                (devices[replica.device].kind, devices[replica.device].region, replica.tensor_parallel, replica.share)
                for replica in stage.replicas
            ),
        )
        for stage in pipeline.stages
    )
    return stages, pipeline.microbatches


def replace_pipelines(plan: Plan, group: Sequence[int], changed: Sequence[Pipeline]) -> Plan:
    """Return the plan with ``changed`` in place of the pipelines of a group."""
    pipelines = list(plan.pipelines)
    for index, pipeline in zip(group, changed, strict=True):
        pipelines[index] = pipeline
    return replace(plan, pipelines=tuple(pipelines))
