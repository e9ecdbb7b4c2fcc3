"""Computes the iteration time of a plan by the closed form of Sailor's simulator (github.com/eth-easl/sailor).

With m microbatches in a pipeline, and c and t the seconds that a stage computes and transfers for one microbatch::

    iteration = max over pipelines ((m - 1) * max over stages (c + t) + sum of t + sum of c + update)
              + max over stages (ring all-reduce)

The closed form assumes 32-bit tensors, Adam, one zone, and no overlap of compute and transfers. As in Sailor, the last
stage's transfer is twice its gradient; the first stage's is one activation, or two with more than three stages; the
time of a stage's update is that of its first layer.

Where a plan has features that the form does not express, the worst case counts: the largest microbatch of a pipeline
stands for all, and the replica with the most samples, or of the slowest kind, for its stage. Each pipeline has its own
number of microbatches. If pipelines divide the layers differently, each range of layers that the same stages hold has a
ring of its own, and the rings run one after the other.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log2

from experiments.benches.sailor.closed_form_tables import JudgeTables
from experiments.benches.sailor.measured_files import Node
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario

BYTES_PER_VALUE = 4
# Bytes that Sailor counts for a parameter with its gradient, Adam's two moments and two further copies.
STATE_BYTES_PER_PARAMETER = 24
FRAMEWORK_BYTES = 2_000_000_000
SHARDED_FRAMEWORK_BYTES = 3_000_000_000
BUCKET_BYTES = 500_000_000


@dataclass(frozen=True, slots=True)
class ClosedFormResult:
    """The parts of an iteration time: compute with bubbles, transfers and update of the slowest pipeline; all-reduces.

    ``fits`` tells whether every replica fits into memory by Sailor's rule, which differs from ropebridge's.
    """

    compute_s: float
    transfer_s: float
    update_s: float
    sync_s: float
    fits: bool

    @property
    def iteration_s(self) -> float:
        """Return the duration of one training step, seconds."""
        return self.compute_s + self.transfer_s + self.update_s + self.sync_s


def judge(plan: Plan, scenario: Scenario, tables: JudgeTables) -> ClosedFormResult:
    """Evaluate a plan by the closed form.

    Raises:
        InputError: The tables lack a device kind, a degree of tensor parallelism or a pair of nodes of the plan.
    """
    parts = [_pipeline_parts(pipeline, scenario, tables) for pipeline in plan.pipelines]
    compute_s, transfer_s, update_s = max(parts, key=sum)
    fits = all(_fits(pipeline, scenario, tables) for pipeline in plan.pipelines)
    return ClosedFormResult(compute_s, transfer_s, update_s, _sync_s(plan, scenario, tables), fits)


def _pipeline_parts(pipeline: Pipeline, scenario: Scenario, tables: JudgeTables) -> tuple[float, float, float]:
    """Return the seconds of a pipeline's compute, transfers and update, with the slowest replica of each stage."""
    stages = pipeline.stages
    compute_s, updates_s = [], []
    for stage in stages:
        nodes = set(_nodes(stage, pipeline.microbatches, scenario, tables))
        layers = (stage.first_layer, stage.end_layer)
        compute_s.append(max(tables.compute_s(node, *layers, samples) for node, samples in nodes))
        updates_s.append(max(tables.update_s(node, stage.first_layer, samples) for node, samples in nodes))
    transfer_s = [_transfer_s(pipeline, index, scenario, tables) for index in range(len(stages))]
    slowest = max(range(len(stages)), key=lambda index: compute_s[index] + transfer_s[index])
    repeats = len(pipeline.microbatches) - 1
    computed_s, transferred_s = (repeats * each[slowest] + sum(each) for each in (compute_s, transfer_s))
    return computed_s, transferred_s, max(updates_s)


def _nodes(
    stage: Stage, microbatches: Sequence[int], scenario: Scenario, tables: JudgeTables
) -> Iterator[tuple[Node, int]]:
    """Yield each replica of a stage as a node of the tables, with the most samples that it takes of a microbatch."""
    for replica, samples in zip(stage.replicas, stage.most_samples(set(microbatches)), strict=True):
        yield _node(replica, scenario, tables), samples


def _node(replica: Replica, scenario: Scenario, tables: JudgeTables) -> Node:
    return tables.node(scenario.cluster.by_name[replica.device].kind, replica.tensor_parallel)


def _transfer_s(pipeline: Pipeline, index: int, scenario: Scenario, tables: JudgeTables) -> float:
    """Return the seconds of a stage's transfers for a microbatch, counted as in the module's docstring."""
    stages = pipeline.stages
    if len(stages) == 1:
        return 0.0
    stage = stages[index]
    activation_s = gradient_s = 0.0
    if index + 1 < len(stages):
        activation_s = _send_s(pipeline, index, index + 1, stage.end_layer - 1, scenario, tables)
    if index > 0:
        gradient_s = _send_s(pipeline, index, index - 1, stage.first_layer, scenario, tables)
    if index == 0:
        return activation_s * (2 if len(stages) > 3 else 1)
    return 2 * gradient_s if index + 1 == len(stages) else activation_s + gradient_s


def _send_s(
    pipeline: Pipeline, sender: int, receiver: int, layer: int, scenario: Scenario, tables: JudgeTables
) -> float:
    """Return the seconds until all replicas of a stage have sent a layer's output, or its gradient, at once."""
    senders = list(_nodes(pipeline.stages[sender], pipeline.microbatches, scenario, tables))
    receivers = [_node(replica, scenario, tables) for replica in pipeline.stages[receiver].replicas]
    flows = {(node, receivers[number % len(receivers)], samples) for number, (node, samples) in enumerate(senders)}
    output_bytes = BYTES_PER_VALUE * tables.output_values(layer)
    return max(_message_s(source, target, samples * output_bytes, tables) for source, target, samples in flows)


def _sync_s(plan: Plan, scenario: Scenario, tables: JudgeTables) -> float:
    """Return the largest time, over the stages, of the ring all-reduces of a stage's gradients, seconds."""
    cuts = sorted({stage.first_layer for pipeline in plan.pipelines for stage in pipeline.stages})
    cuts.append(plan.pipelines[0].stages[-1].end_layer)
    ring_s = {first: _ring_s(plan, first, end, scenario, tables) for first, end in pairwise(cuts)}
    return max(
        sum(seconds for first, seconds in ring_s.items() if stage.first_layer <= first < stage.end_layer)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    )


def _ring_s(plan: Plan, first: int, end: int, scenario: Scenario, tables: JudgeTables) -> float:
    """Return the seconds of a ring all-reduce of the gradients of layers ``first`` to ``end - 1``."""
    replicas = [
        replica
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if stage.first_layer <= first < stage.end_layer
        for replica in stage.replicas
    ]
    if len(replicas) == 1:
        return 0.0
    alone = [tables.node(scenario.cluster.by_name[replica.device].kind, 1) for replica in replicas]
    neighbours = set(zip(alone, [*alone[1:], alone[0]], strict=True))
    parameters = tables.parameters(1, first, end)
    size_bytes = BYTES_PER_VALUE * parameters / min(replica.tensor_parallel for replica in replicas)
    return sum(
        2 * (len(replicas) - 1) * max(_message_s(*pair, bucket / len(replicas), tables) for pair in neighbours)
        for bucket in _buckets(size_bytes)
    )


def _buckets(size_bytes: float) -> Iterable[float]:
    whole, rest = divmod(size_bytes, BUCKET_BYTES)
    return [BUCKET_BYTES] * int(whole) + ([rest] if rest else [])


def _message_s(source: Node, target: Node, size_bytes: float, tables: JudgeTables) -> float:
    """Return the seconds of a message at the rate of the measured curve; infinity if the curve is not above zero."""
    if not size_bytes:
        return 0.0
    curve = tables.network.curve(source, target)
    exponent = log2(size_bytes / 1e6)
    gigabytes_per_s = curve.quadratic * exponent**2 + curve.linear * exponent + curve.constant
    return size_bytes / 1e9 / gigabytes_per_s if gigabytes_per_s > 0 else inf


def _fits(pipeline: Pipeline, scenario: Scenario, tables: JudgeTables) -> bool:
    stages = pipeline.stages
    return all(
        _needed_bytes(stage, replica, samples * (len(stages) - index), tables)
        <= min(scenario.cluster.by_name[device].memory_bytes for device in replica.devices)
        for index, stage in enumerate(stages)
        for replica, samples in zip(stage.replicas, stage.most_samples(set(pipeline.microbatches)), strict=True)
    )


def _needed_bytes(stage: Stage, replica: Replica, samples: int, tables: JudgeTables) -> float:
    """Return the bytes that Sailor counts on each device of a replica with saved activations of ``samples`` samples."""
    degree = replica.tensor_parallel
    states = STATE_BYTES_PER_PARAMETER * tables.parameters(degree, stage.first_layer, stage.end_layer)
    kept = BYTES_PER_VALUE * samples * tables.activation_values(degree, stage.first_layer, stage.end_layer)
    return states + kept + (FRAMEWORK_BYTES if degree == 1 else SHARDED_FRAMEWORK_BYTES)
