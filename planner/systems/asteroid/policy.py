"""Asteroid's policies for lost devices: pipeline replay, and its baseline, heavy rescheduling, as others describe it.

Pipeline replay (``asteroid-replay``) repairs the plan. A stage with several replicas goes on without the lost ones. The
layers of a stage without any replica left go to the neighbouring stages. Boundaries between stages shift so that the
work of each stage is in proportion to its group's capacity; all layers move between neighbours at the same time. The
state of the lost layers comes from their backup (`planner.adapt.migration`), and the interrupted round is repeated.

Assumed: the work of a layer is its mean time over the devices, in place of its FLOPs; the capacity of a group is the
sum of its devices' speeds on the whole model; depths follow Asteroid's rule, reduced where memory is too small;
boundaries that do not fit into memory are replaced by the nearest ones that do.

Ours: with slow links, a good plan need not divide the work in proportion to capacity. So a second candidate keeps all
boundaries and divides only the lost layers between their neighbours. The candidate with the shorter round latency,
corrected for full duplex, is chosen.

Heavy rescheduling (``heavy-rescheduling``) gathers the model on one device, runs the full planner on the remaining
devices, and redistributes the model; `full_redistribution` returns these transfers. The simulator transfers less: only
the layers that devices of the new plan lack.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from planner.adapt.migration import Migration, migration_between
from planner.adapt.policy import Observation
from planner.cost.in_flight import fitting_depths, no_split_fits
from planner.cost.layers import mean_compute_s
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.round_latency import round_latency_s, round_steps
from planner.systems.asteroid.strategy import HybridRules, asteroid_depth, by_memory, hybrid_plan
from traces.common.errors import InputError

Boundaries = Callable[[Sequence[Stage], Sequence[float], Sequence[float]], list[int]]
"""Function that returns the end layers of all stages but the last, from: the remaining stages, the work of all layers
before each layer, and the capacities of the stages. See `in_proportion`."""


def in_proportion(stages: Sequence[Stage], until_s: Sequence[float], capacities: Sequence[float]) -> list[int]:
    """Return the end layers of all stages but the last, with work in proportion to capacity.

    Layers move only to a neighbouring stage.

    Args:
        stages: The remaining stages; layers of lost stages belong to none of them.
        until_s: Work of all layers before each layer, seconds on a mean device, [layers + 1].
        capacities: Capacities of the stages, samples per second.
    """
    shares = list(accumulate(capacities))
    ends = []
    for index, (left, right) in enumerate(pairwise(stages)):
        wanted_s = until_s[-1] * shares[index] / shares[-1]
        ends.append(_nearest(until_s, wanted_s, left.first_layer + 1, right.end_layer - 1))
    return ends


def where_they_were(stages: Sequence[Stage], until_s: Sequence[float], capacities: Sequence[float]) -> list[int]:
    """Return the end layers of all stages but the last, if only the layers of lost stages move.

    These are divided between the two neighbouring stages in proportion to capacity. The arguments are those of
    `in_proportion`: stages, the work before each layer, and capacities in samples per second.
    """
    ends = []
    for (left, right), (own, other) in zip(pairwise(stages), pairwise(capacities), strict=True):
        first_s, end_s = until_s[left.end_layer], until_s[right.first_layer]
        wanted_s = first_s + (end_s - first_s) * own / (own + other)
        ends.append(_nearest(until_s, wanted_s, left.end_layer, right.first_layer))
    return ends


def replay(
    plan: Plan,
    scenario: Scenario,
    gone: Collection[str],
    rules: Sequence[Boundaries] = (in_proportion, where_they_were),
) -> Plan:
    """Return the plan repaired by pipeline replay, without the lost devices.

    Args:
        plan: Plan that used the lost devices.
        scenario: Scenario that the plan is for.
        gone: Names of the lost devices.
        rules: Candidate rules for the new boundaries; the one with the shortest round is applied.

    Raises:
        InputError: A pipeline has lost all devices, or its layers do not fit into the remaining devices' memory.
    """
    return replace(
        plan, pipelines=tuple(_without(each, scenario, gone, rules, plan.strategy) for each in plan.pipelines)
    )


def _without(
    pipeline: Pipeline, scenario: Scenario, gone: Collection[str], rules: Sequence[Boundaries], strategy: str
) -> Pipeline:
    left = [
        replace(stage, replicas=tuple(each for each in stage.replicas if not set(each.devices) & set(gone)))
        for stage in pipeline.stages
    ]
    if left == list(pipeline.stages):
        return pipeline
    stages = [stage for stage in left if stage.replicas]
    if not stages:
        raise InputError(
            "a pipeline has lost all of its devices",
            where="policy 'asteroid-replay'",
            valid="at least one device of each pipeline must remain; or take policy 'heavy-rescheduling'",
        )
    samples = max(pipeline.microbatches)
    until_s = mean_compute_s(scenario, samples).tolist()
    capacities = [_capacity(stage, scenario, samples) for stage in stages]
    wanted = [rule(stages, until_s, capacities) for rule in rules]
    fitted = [_fitted(stages, ends, scenario, pipeline.microbatches) for ends in wanted]
    found = [replace(pipeline, stages=each) for each in fitted if each is not None]
    if not found:
        names = [device for stage in stages for replica in stage.replicas for device in replica.devices]
        raise no_split_fits(scenario, strategy, [scenario.cluster.by_name[name] for name in names])
    count = len(pipeline.microbatches)
    return min(found, key=lambda each: round_latency_s(round_steps(each, scenario), count, duplex=True))


def _nearest(until_s: Sequence[float], wanted_s: float, first: int, last: int) -> int:
    return min(range(first, last + 1), key=lambda layer: abs(until_s[layer] - wanted_s))


def _capacity(stage: Stage, scenario: Scenario, samples: int) -> float:
    speeds = []
    for replica in stage.replicas:
        model, kind = scenario.model.at_degree(replica.tensor_parallel), scenario.cluster.by_name[replica.device].kind
        speeds.append(samples / model.times(0, len(model.layers), kind, samples).total_s)
    return sum(speeds)


def _fitted(
    stages: Sequence[Stage], wanted: Sequence[int], scenario: Scenario, microbatches: Sequence[int]
) -> tuple[Stage, ...] | None:
    """Return the stages with the end layers nearest to ``wanted`` that fit into memory; None if none do.

    Depths are Asteroid's, or smaller where memory requires it.
    """
    fitted = _with_ends(stages, (*wanted, len(scenario.model.layers)), scenario, microbatches)
    if fitted is not None:
        return fitted
    ends = _nearest_that_fit(stages, wanted, scenario, microbatches)
    return _with_ends(stages, ends, scenario, microbatches) if ends is not None else None


def _with_ends(
    stages: Sequence[Stage], ends: Sequence[int], scenario: Scenario, microbatches: Sequence[int]
) -> tuple[Stage, ...] | None:
    edges = list(pairwise((0, *ends)))
    if any(end <= first for first, end in edges):
        return None
    moved = [replace(s, first_layer=first, end_layer=end) for s, (first, end) in zip(stages, edges, strict=True)]
    wanted_depths = [asteroid_depth(len(stages) - index) for index in range(len(stages))]
    depths = fitting_depths(wanted_depths, moved, scenario, microbatches)
    if depths is None:
        return None
    return tuple(replace(stage, in_flight=depth) for stage, depth in zip(moved, depths, strict=True))


def _nearest_that_fit(
    stages: Sequence[Stage], wanted: Sequence[int], scenario: Scenario, microbatches: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the end layers that fit into memory, with one microbatch in flight, and are nearest to ``wanted``.

    The distance is the sum over all stages of the layers by which an end deviates; None if no ends fit.
    """
    layers = len(scenario.model.layers)
    # End of the last stage placed so far to (sum of deviations in layers, ends of all stages placed so far).
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage, target in zip(stages, [*wanted, layers], strict=True):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for first, (off, ends) in best.items():
            for end in range(first + 1, layers + 1):
                moved = replace(stage, first_layer=first, end_layer=end)
                choice = (off + abs(end - target), (*ends, end))
                if (end not in longer or choice < longer[end]) and fitting_depths(
                    (1,), (moved,), scenario, microbatches
                ):
                    longer[end] = choice
        best = longer
    return best[layers][1] if layers in best else None


class AsteroidReplay:
    """The policy ``asteroid-replay``; each run needs an object of its own."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the repaired plan, or None if the plan uses no lost device.

        Raises:
            InputError: The remaining devices cannot hold the model.
        """
        if not set(observation.gone) & set(plan.devices):
            return None
        return replay(plan, self._scenario, observation.gone)


class HeavyRescheduling:
    """The policy ``heavy-rescheduling``; each run needs an object of its own."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return a new plan for the remaining devices, or None if the plan uses no lost device.

        Raises:
            InputError: No split fits into the remaining devices.
        """
        if not set(observation.gone) & set(plan.devices):
            return None
        return replan(plan, self._scenario, {*observation.gone, *observation.away})


def replan(plan: Plan, scenario: Scenario, gone: Collection[str]) -> Plan:
    """Return the Asteroid planner's plan for the remaining devices, with the microbatch size of the current plan.

    Raises:
        InputError: No split fits into the remaining devices.
    """
    left = tuple(device for device in scenario.cluster.devices if device.name not in gone)
    size = max(max(pipeline.microbatches) for pipeline in plan.pipelines)
    same_size = replace(scenario, training=replace(scenario.training, microbatch=size))
    return hybrid_plan(same_size, by_memory(left), plan.strategy, HybridRules())


def full_redistribution(
    old: Plan,
    new: Plan,
    scenario: Scenario,
    gone: Collection[str],
    backups: Mapping[int, Sequence[str]],
) -> tuple[Migration, Migration]:
    """Return the transfers that gather the model on one device, and the transfers that distribute it from there.

    Assumed: the model is gathered on the first device of the new plan, which receives only the layers that it lacks.
    Every other device then receives all of its layers, even those that it held before.

    Args:
        old: Plan that used the lost devices.
        new: Plan that replaces the current one.
        scenario: Scenario that gives sizes and paths.
        gone: Names of the lost devices.
        backups: Index of a layer to the names of the devices that keep a backup of the layer's state.

    Raises:
        InputError: No remaining device holds some layer or its backup.
    """
    everything = Stage(0, len(scenario.model.layers), (Replica(new.devices[0]),), 1)
    gathered = Plan(new.scenario, new.model, new.strategy, new.schedule, (Pipeline((everything,), (1,)),))
    return migration_between(old, gathered, scenario, gone, backups), migration_between(gathered, new, scenario)
