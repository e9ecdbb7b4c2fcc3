"""Policies ``asteroid-replay`` and ``heavy-rescheduling``, which replace the plan after the loss of a device.

Both come from Asteroid (arXiv 2408.08015), as other publications describe the paper.

Pipeline replay (``asteroid-replay``) repairs the plan. A stage with several replicas goes on without the lost ones. If
a stage has lost all of its replicas, its layers go to the neighbouring stages. Then the boundaries between stages are
shifted, so that the work of each stage is in proportion to its group's capacity; layers move between neighbouring
stages only. The state of lost layers is restored from a backup (`planner.adapt.migration`), and the interrupted round
is repeated.

Assumption: the work of a layer is its mean time over the devices, in place of its number of operations; the capacity
of a group is the sum of its devices' speeds on the whole model; depths follow Asteroid's rule, and are smaller where
memory requires it; boundaries that do not fit into memory are replaced by the nearest ones that do.

Our addition: with slow links, good plans do not divide the work in proportion to capacity. A second candidate therefore
keeps the boundaries, except that the layers of a lost stage are divided between its neighbours. The candidate with the
shorter round latency, corrected for full-duplex links, is used.

Heavy rescheduling (``heavy-rescheduling``) is the baseline of the paper: all layers are gathered on one device, the
planner makes a new plan for the remaining devices, and the layers are distributed again. `full_redistribution` returns
these transfers, which reproductions time. The policy itself moves less: each device gets the layers that it lacks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from planner.adapt.migration import Migration, is_reachable, migration_between
from planner.adapt.observation import Observation
from planner.adapt.policy import with_usable_schedule
from planner.cost.in_flight import fitting_depths, no_split_fits
from planner.cost.layers import mean_compute_s
from planner.cost.stage import replica_times
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.round_latency import round_latency_s, round_steps
from planner.systems.asteroid.strategy import HybridRules, asteroid_depth, by_memory, counted_plan
from traces.common.errors import InputError

# Time of planning on one core of an AMD EPYC of family 25, model 17 (Zen 4), with Python 3.11, seconds: of replay for
# each rule for boundaries, and of heavy rescheduling for each candidate stage that the search looks at. These are the
# processor times of two departures in each 32-bit setting of `ropebridge reproduce asteroid`, divided by the numbers of
# rules and of candidates, 39,716. A board is slower.
RULE_S, CANDIDATE_S = 0.0003, 50e-6

Boundaries = Callable[[Sequence[Stage], Sequence[float], Sequence[float]], list[int]]
"""Rule for new boundaries between stages, with the arguments and the result of `in_proportion`."""


def in_proportion(stages: Sequence[Stage], until_s: Sequence[float], capacities: Sequence[float]) -> list[int]:
    """Return new end layers, for all stages but the last, that divide the work in proportion to capacity.

    Layers move only between neighbouring stages.

    Args:
        stages: The remaining stages; the layers of lost stages belong to none of them.
        until_s: Running sum of the layers' mean times over the devices, seconds, [layers + 1].
        capacities: Capacity of each stage, samples per second.
    """
    shares = list(accumulate(capacities))
    ends = []
    for index, (left, right) in enumerate(pairwise(stages)):
        wanted_s = until_s[-1] * shares[index] / shares[-1]
        ends.append(_nearest(until_s, wanted_s, left.first_layer + 1, right.end_layer - 1))
    return ends


def where_they_were(stages: Sequence[Stage], until_s: Sequence[float], capacities: Sequence[float]) -> list[int]:
    """Return new end layers, for all stages but the last, that move only the layers of lost stages.

    These layers are divided between the two neighbouring stages in proportion to ``capacities``, in samples per second.
    The arguments are those of `in_proportion`.
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
        rules: Rules for the new boundaries; the result of the one with the shortest round is used.

    Raises:
        InputError: A pipeline has lost all of its devices, or the remaining ones have too little memory.
    """
    pipelines = tuple(_without(each, scenario, gone, rules, plan.strategy) for each in plan.pipelines)
    return with_usable_schedule(plan, replace(plan, pipelines=pipelines), scenario)


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
            f"with the loss of {', '.join(sorted(gone))} a pipeline has lost all of its devices",
            where="policy 'asteroid-replay'",
            valid="keep at least one device of each pipeline, or take policy 'heavy-rescheduling'",
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
    whole = [Stage(0, len(scenario.model.layers), (replica,), 1) for replica in stage.replicas]
    return sum(samples / replica_times(scenario, each, each.replicas[0], samples).total_s for each in whole)


def _fitted(
    stages: Sequence[Stage], wanted: Sequence[int], scenario: Scenario, microbatches: Sequence[int]
) -> tuple[Stage, ...] | None:
    """Return the stages with end layers ``wanted`` or, if these need too much memory, the nearest that fit, if any."""
    fitted = _with_ends(stages, (*wanted, len(scenario.model.layers)), scenario, microbatches)
    if fitted is not None:
        return fitted
    ends = _nearest_that_fit(stages, wanted, scenario, microbatches)
    return _with_ends(stages, ends, scenario, microbatches) if ends is not None else None


def _with_ends(
    stages: Sequence[Stage], ends: Sequence[int], scenario: Scenario, microbatches: Sequence[int]
) -> tuple[Stage, ...] | None:
    """Return the stages with new end layers and depths that fit into memory; None if a stage is empty or too large."""
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
    """Return the end layers nearest to ``wanted`` with which every stage fits into memory; None if there are none.

    The distance of two lists of end layers is the sum of the absolute differences of their entries. A stage fits if its
    memory holds one microbatch in flight.
    """
    layers = len(scenario.model.layers)
    # End layer of the first stages to the placement of these stages with the least distance, as (distance, end layers).
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
        """Return the repaired plan, or None if the plan uses no lost device or none is left; raise as `replay`."""
        is_hit = not set(observation.gone).isdisjoint(plan.devices)
        is_any_left = not self._scenario.cluster.by_name.keys() <= observation.missing
        return self._repaired(plan, observation) if is_hit and is_any_left else None

    def _repaired(self, plan: Plan, observation: Observation) -> Plan | None:
        return replay(plan, self._scenario, observation.gone)


class HeavyRescheduling(AsteroidReplay):
    """The policy ``heavy-rescheduling``; each run needs an object of its own."""

    def _repaired(self, plan: Plan, observation: Observation) -> Plan | None:
        found = replan(plan, self._scenario, observation.missing)
        return found if is_reachable(observation, found, self._scenario) else None


def replan(plan: Plan, scenario: Scenario, gone: Collection[str]) -> Plan:
    """Return Asteroid's plan for the remaining devices, with the microbatch size of ``plan``.

    Raises:
        InputError: No split fits into the remaining devices.
    """
    return counted_replan(plan, scenario, gone)[0]


def counted_replan(plan: Plan, scenario: Scenario, gone: Collection[str]) -> tuple[Plan, int]:
    """Return the result of `replan`, and the number of candidate stages that its search has looked at."""
    left = tuple(device for device in scenario.cluster.devices if device.name not in gone)
    size = max(max(pipeline.microbatches) for pipeline in plan.pipelines)
    same_size = replace(scenario, training=replace(scenario.training, microbatch=size))
    return counted_plan(same_size, by_memory(left), plan.strategy, HybridRules())


def full_redistribution(
    old: Plan,
    new: Plan,
    scenario: Scenario,
    gone: Collection[str],
    backups: Mapping[int, Sequence[str]],
) -> tuple[Migration, Migration]:
    """Return the transfers of heavy rescheduling: those that gather the model, and those that distribute it.

    Assumption: the model is gathered on the first device of the new plan, which receives only the layers that it lacks.
    Every other device then receives all of its layers, even those that it held before.

    Args:
        old: Plan that used the lost devices.
        new: Plan for the remaining devices.
        scenario: Scenario that gives sizes and paths.
        gone: Names of the lost devices.
        backups: Index of a layer to the names of the devices that keep a backup of the layer's state.

    Raises:
        InputError: No remaining device holds some layer or its backup.
    """
    everything = Stage(0, len(scenario.model.layers), (Replica(new.devices[0]),), 1)
    gathered = Plan(new.scenario, new.model, new.strategy, new.schedule, (Pipeline((everything,), (1,)),))
    return migration_between(old, gathered, scenario, gone, backups), migration_between(gathered, new, scenario)
