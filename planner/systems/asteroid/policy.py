"""Asteroid's policies for lost devices: pipeline replay, and heavy rescheduling as its baseline [second-hand].

Pipeline replay (``asteroid-replay``) repairs the plan. A stage of several replicas loses the replica; the layers of a
stage on one device go to its neighbours. Boundaries between neighbours shift so that the work of each stage is in
proportion to its group's capacity; all layers move between neighbours at the same time. The lost layers' state comes
from their backup (`planner.adapt.migration`), and the interrupted round is run again.

Assumed: the work of a layer is its mean time over the devices, in place of its FLOPs; the capacity of a group is the
sum of its devices' speeds on the whole model; depths follow Asteroid's rule as far as memory allows; boundaries that do
not fit into memory are replaced by the nearest ones that do. Ours: where transfers are slow, the work is not in
proportion to capacity on purpose, so boundaries may also stay, with only the lost layers divided between their
neighbours; the round latency, corrected for full duplex, decides between the two.

Heavy rescheduling (``heavy-rescheduling``) gathers the model, runs the full planner on the devices that are left, and
redistributes the model; `full_redistribution` returns what then moves. The simulator moves only what devices of the new
plan lack, which is less.
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

# From the remaining stages, the work of all layers before each one, and the stages' capacities, to the layers at which
# all stages but the last should end.
Boundaries = Callable[[Sequence[Stage], Sequence[float], Sequence[float]], list[int]]


def in_proportion(stages: Sequence[Stage], until_s: Sequence[float], capacities: Sequence[float]) -> list[int]:
    """Return where stages end if their work is in proportion to capacity and layers move to neighbours only.

    Args:
        stages: The remaining stages; the layers of lost ones lie between them.
        until_s: Work of all layers before each one, seconds of a mean device, [layers + 1].
        capacities: Capacities of the stages, samples per second.
    """
    shares = list(accumulate(capacities))
    ends = []
    for index, (left, right) in enumerate(pairwise(stages)):
        wanted_s = until_s[-1] * shares[index] / shares[-1]
        ends.append(_nearest(until_s, wanted_s, left.first_layer + 1, right.end_layer - 1))
    return ends


def where_they_were(stages: Sequence[Stage], until_s: Sequence[float], capacities: Sequence[float]) -> list[int]:
    """Return where stages end if only lost layers move, divided between their two neighbours by capacity.

    See `in_proportion` for the arguments: stages, the work before each layer, and capacities in samples per second.
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
    """Return the plan without lost devices.

    Args:
        plan: Plan until now.
        scenario: Scenario that the plan is for.
        gone: Names of the lost devices.
        rules: Rules for the new boundaries; the one with the shortest round is applied.

    Raises:
        InputError: A pipeline has lost all devices, or its layers do not fit into the others' memory.
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
            where="replay",
            valid="layers move between stages of one pipeline: at least one of its devices is left",
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
    """Return the stages that fit into memory with the ends nearest to those wanted, at Asteroid's depths or smaller."""
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
    """Return the ends that fit into memory with one microbatch in flight and deviate by the fewest layers in all."""
    layers = len(scenario.model.layers)
    # From the end of the stages so far to the layers by which their ends deviate in all, and these ends.
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
    """Pipeline replay; one object for one run."""

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
    """Heavy rescheduling; one object for one run."""

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
    """Return the full planner's plan for a scenario without lost devices, with microbatches of the same size.

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
    """Return the transfers that gather the model on one device, and those that distribute it from there.

    Assumed: the model is gathered on the first device of the new plan; layers that it holds already are not sent, and
    every other device receives all of its layers, whether it held them or not.

    Args:
        old: Plan until now.
        new: Plan from now on.
        scenario: Scenario that gives sizes and paths.
        gone: Names of the lost devices.
        backups: Layer to the devices that keep a backup of its state.

    Raises:
        InputError: No device holds a layer any more.
    """
    everything = Stage(0, len(scenario.model.layers), (Replica(new.devices[0]),), 1)
    gathered = Plan(new.scenario, new.model, new.strategy, new.schedule, (Pipeline((everything,), (1,)),))
    return migration_between(old, gathered, scenario, gone, backups), migration_between(gathered, new, scenario)
