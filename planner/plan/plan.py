"""A plan: which device computes which layers for which samples, and in which order, as immutable dataclasses."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise

from planner.plan.actions import Action
from planner.plan.outer_step import OuterStep
from planner.scenario.scenario import Scenario

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class Replica:
    """One device of a stage, or several devices of one host that share each layer by tensor parallelism.

    Attributes:
        device: Name of the device; it sends and receives on behalf of ``partners``.
        share: Weight of the replica: it takes share / (sum of the stage's shares) of every microbatch's samples.
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
        """Names of all devices of the tensor-parallel group: ``device``, followed by ``partners``."""
        return (self.device, *self.partners)


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous range of layers on one or more devices.

    Attributes:
        first_layer: Index of the stage's first layer.
        end_layer: Index after the stage's last layer.
        replicas: Devices that hold these layers; each takes an interval of every microbatch's samples.
        in_flight: Limit on the microbatches whose forward has run in this stage and whose backward has not.
        recompute: Whether a forward saves only the stage's input, and the backward recomputes the activations from it.
    """

    first_layer: int
    end_layer: int
    replicas: tuple[Replica, ...]
    in_flight: int
    recompute: bool = False

    @property
    def layers(self) -> range:
        """Indices of the stage's layers."""
        return range(self.first_layer, self.end_layer)

    def intervals(self, samples: int) -> tuple[tuple[int, int], ...]:
        """Return the interval (start, stop) of a microbatch of ``samples`` that each replica takes, [replicas].

        Bounds are rounded cumulative shares, so that the intervals of consecutive replicas neither overlap nor leave a
        gap.
        """
        if len(self.replicas) == 1:
            return ((0, samples),)
        total = sum(replica.share for replica in self.replicas)
        bounds = [0, *(round(samples * part / total) for part in accumulate(r.share for r in self.replicas))]
        return tuple(pairwise(bounds))

    def most_samples(self, microbatches: Iterable[int]) -> tuple[int, ...]:
        """Return, for each replica, the most samples that the replica takes of a microbatch of any given size.

        Every size is tried, because rounding can give a replica more samples of a smaller microbatch.
        """
        widths = ([stop - start for start, stop in self.intervals(samples)] for samples in set(microbatches))
        return tuple(max(column) for column in zip(*widths, strict=True))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order, and the microbatches of one step that pass through them.

    Attributes:
        stages: Stages in the order of the forward; together they cover every layer of the model once.
        microbatches: Number of samples of each microbatch.
        orders: Sequence of actions of each worker, indexed by worker number, for the schedule `EXPLICIT`; empty for
            every other schedule.
    """

    stages: tuple[Stage, ...]
    microbatches: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...] = ()

    @property
    def workers(self) -> tuple[int, ...]:
        """Worker number of each stage, from 0 in the order of stages; stages on the same devices share one worker."""
        seen: dict[tuple[str, ...], int] = {}
        return tuple(
            seen.setdefault(tuple(replica.device for replica in stage.replicas), len(seen)) for stage in self.stages
        )

    @property
    def samples(self) -> int:
        """Samples per step in this pipeline."""
        return sum(self.microbatches)

    def with_depths(self, depths: Iterable[int]) -> "Pipeline":
        """Return the pipeline with the given limits of microbatches in flight, one for each stage."""
        pairs = zip(self.stages, depths, strict=True)
        stages = tuple(stage if stage.in_flight == depth else replace(stage, in_flight=depth) for stage, depth in pairs)
        return replace(self, stages=stages)


@dataclass(frozen=True, slots=True)
class Synchronisation:
    """How pipelines keep their copies of a layer consistent.

    Attributes:
        method: Method of exchange. ``allreduce``: gradients are summed in every step. ``asgd``: each pipeline sends the
            gradients of every step to the other pipelines, which apply them on arrival and never wait. ``asgd-ga``: as
            ``asgd``, with the sum of the gradients of ``interval_steps`` steps. ``ma``: parameters are sent every
            ``interval_steps`` steps, and receivers average them. ``asgd-ga`` and ``ma`` are from Cloudless-Training,
            arXiv 2303.05330. ``diloco``: every ``interval_steps`` steps pipelines wait for each other's
            pseudo-gradients and take an outer step. ``diloco-streaming``: as ``diloco``, by fragments of the model,
            while training goes on. ``diloco-decoupled``: pipelines take steps at their own speed; a device that trains
            nothing takes the outer step of a fragment with the pseudo-gradients of those that are there.
        algorithm: Algorithm of all-reduce: ``ring``, ``tree`` or ``hierarchical`` (inside regions first).
        interval_steps: Steps between two exchanges; 1 for ``allreduce`` and ``asgd``.
        staleness_bound: Limit on a pipeline's lead: before step n, counted from 0, it waits until it has received
            (n - staleness_bound) // interval_steps updates from every other pipeline; None for no limit, and for the
            methods with an outer step.
        bucket_bytes: Size of a gradient bucket: during backward, the all-reduce of a bucket starts as soon as the
            gradients of whole layers with this many bytes are complete. 0: it starts after a device's last action.
        outer: Settings of the outer step of the methods in `OUTER_METHODS`.
    """

    method: str = "allreduce"
    algorithm: str = "ring"
    interval_steps: int = 1
    staleness_bound: int | None = None
    bucket_bytes: int = 0
    outer: OuterStep = field(default_factory=OuterStep)

    @property
    def has_outer_step(self) -> bool:
        """Whether pipelines train separately and meet in outer steps."""
        return self.method in OUTER_METHODS

    @property
    def has_common_outer_step(self) -> bool:
        """Whether pipelines meet in outer steps at the same step of each, which all finish."""
        return self.has_outer_step and not self.is_decoupled

    @property
    def exchange_settings(self) -> tuple[int, OuterStep]:
        """The steps between two exchanges, and the settings of the outer step."""
        return self.interval_steps, self.outer

    @property
    def is_decoupled(self) -> bool:
        """Whether pipelines take steps at their own speed, and devices that train nothing take the outer steps."""
        return self.method == DECOUPLED

    @property
    def trains_separately(self) -> bool:
        """Whether each pipeline updates its parameters from its own samples only, between exchanges of parameters."""
        return self.has_outer_step or self.method == "ma"


DECOUPLED = "diloco-decoupled"
METHODS = ("allreduce", "asgd", "asgd-ga", "ma", "diloco", "diloco-streaming", DECOUPLED)
OUTER_METHODS = ("diloco", "diloco-streaming", DECOUPLED)
ALGORITHMS = ("ring", "tree", "hierarchical")

# Name of the schedule of a plan whose pipelines list their actions in `Pipeline.orders`.
EXPLICIT = "explicit"

# With ``scheduled``, each device runs its actions in the order of the schedule. With ``dynamic``, a free device chooses
# among the actions whose inputs have arrived, by the rule in planner/schedules/dynamic.py.
ORDERS = ("scheduled", "dynamic")


@dataclass(frozen=True)
class Plan:
    """How a scenario is trained; the simulator and the executor take the same plan.

    Attributes:
        scenario: Name of the scenario that the plan was made for.
        model: Name of the model.
        strategy: Name of the strategy that made the plan.
        schedule: Name of the schedule, one of `planner.schedules.SCHEDULES` or `EXPLICIT`.
        pipelines: Pipelines, each with its own samples of the global batch; gradients are summed over them.
        order: Order of actions, one of `ORDERS`; with ``dynamic``, the schedule only decides whether B is split.
        synchronisation: How copies of the same layer on several devices are kept consistent.
        connections: Number of TCP connections between each pair of communicating devices in different regions.
        compression: Format of transfers between regions, one of `planner.scenario.training.COMPRESSIONS`.
        noise_scale: Gradient noise scale for which the global batch was chosen, samples, by which the learning rate may
            follow the batch (`planner.scenario.training.rate_factor`); None if it is unknown.
        version: Version of the plan file format.
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
    noise_scale: float | None = None
    version: int = SCHEMA_VERSION

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Computed once, because caches of compiled steps look plans up often, and a plan may hold thousands of actions.
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def global_batch(self) -> int:
        """Samples per update over all pipelines."""
        return sum(pipeline.samples for pipeline in self.pipelines)

    @property
    def stages(self) -> list[Stage]:
        """Stages of all pipelines, pipeline by pipeline."""
        return [stage for pipeline in self.pipelines for stage in pipeline.stages]

    @property
    def replicas(self) -> list[Replica]:
        """Replicas of all stages, in the order of `stages`; a device that holds several stages is in several."""
        return [replica for stage in self.stages for replica in stage.replicas]

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of all devices, in the order of `replicas`, each once; the index is the executor's rank."""
        return tuple(dict.fromkeys(device for replica in self.replicas for device in replica.devices))

    @property
    def exchange_set_up(self) -> tuple[object, ...]:
        """What exchanges between pipelines are set up with: they begin anew where it changes."""
        return self.synchronisation.exchange_settings, self.exchange_weights

    @property
    def exchange_weights(self) -> tuple[float, ...]:
        """Share of each pipeline in the global batch, which is its weight in the mean of pseudo-gradients."""
        return tuple(pipeline.samples / self.global_batch for pipeline in self.pipelines)

    @property
    def leaders(self) -> list[list[str]]:
        """For each pipeline the first device of each stage, which exchanges updates with other pipelines."""
        return [
            list(dict.fromkeys(stage.replicas[0].device for stage in pipeline.stages)) for pipeline in self.pipelines
        ]

    @property
    def without_overlap(self) -> "Plan":
        """The plan with ``bucket_bytes`` 0: no gradient is summed while a device still computes."""
        if not self.synchronisation.bucket_bytes:
            return self
        return replace(self, synchronisation=replace(self.synchronisation, bucket_bytes=0))

    def with_microbatches(self, pipeline: int, microbatches: tuple[int, ...], in_flight: tuple[int, ...]) -> "Plan":
        """Return the plan with new microbatch sizes, and new ``in_flight`` per stage, in the pipeline of this index."""
        new = replace(self.pipelines[pipeline].with_depths(in_flight), microbatches=microbatches)
        pipelines = (*self.pipelines[:pipeline], new, *self.pipelines[pipeline + 1 :])
        return replace(self, pipelines=pipelines)


def samples_before(step: int, plans: Sequence[tuple[int, Plan]]) -> int:
    """Return the samples of the steps before ``step``, from the first step of the first plan on.

    Args:
        step: Index of a step, not before the first step of the first plan.
        plans: Pairs of a step and the plan from that step on; a later pair overrides earlier ones whose first step is
            the same or later.
    """
    samples, end = 0, step
    for first, plan in reversed(plans):
        if first < end:
            samples += (end - first) * plan.global_batch
            end = first
    return samples


def equivalent_pipelines(plan: Plan, scenario: Scenario) -> list[list[int]]:
    """Return groups of pipeline indices; pipelines of a group differ only in the names of their devices and in depth.

    Layers, recomputation, shares, tensor parallelism, microbatches, device kinds and regions are equal.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, pipeline in enumerate(plan.pipelines):
        groups[_key(pipeline, scenario)].append(index)
    return list(groups.values())


def representatives(plan: Plan, scenario: Scenario) -> Plan:
    """Return the plan with the first pipeline of each group of equivalent ones, and without sums of gradients."""
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
    """Return the plan with the pipelines at the indices ``group`` replaced by ``changed``, in the same order."""
    pipelines = list(plan.pipelines)
    for index, pipeline in zip(group, changed, strict=True):
        pipelines[index] = pipeline
    return replace(plan, pipelines=tuple(pipelines))
