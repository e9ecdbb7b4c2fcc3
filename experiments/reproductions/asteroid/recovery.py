"""Measures the cost of a board's departure: Asteroid's replay against heavy rescheduling.

Recovery lasts from the departure to the end of the repeated round: detection, planning, migration, and the interrupted
round once more, which begins with an empty pipeline. Detection is that of the simulator; planning is measured on this
machine, which is faster than a board; migrations and rounds are simulated, each with the plan that the policy makes.
"""

from dataclasses import dataclass
from time import perf_counter

from experiments.benches.result import Row
from experiments.reproductions.asteroid.throughput import simulated_samples_per_s
from planner.adapt.migration import backup_holders, migration_between
from planner.plan.plan import Plan
from planner.runs.metrics import step_ends_s
from planner.scenario.faults import DETECTION_S
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.policy import full_redistribution, in_proportion, replan, replay, where_they_were
from sim.migration import travel_s
from sim.simulator import Simulator
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery by one policy, with the seconds of each of its parts."""

    plan: Plan
    planning_s: float
    migration_s: float
    round_s: float

    @property
    def known_s(self) -> float:
        """Return the seconds from the detection of the departure to the end."""
        return self.planning_s + self.migration_s + self.round_s

    @property
    def total_s(self) -> float:
        """Return the seconds from the departure to the end."""
        return DETECTION_S + self.known_s


_PARTS = ("planning_s", "migration_s", "round_s", "total_s")


def recovery_rows(scenario: Scenario, plan: Plan, place: Row) -> list[Row]:
    """Return a row for each device of a plan that may leave; ``place`` holds the columns of model, boards and batch."""
    return [{**place, "lost": device, **_row(scenario, plan, device)} for device in plan.devices]


def _row(scenario: Scenario, plan: Plan, gone: str) -> Row:
    try:
        light, heavy = _replayed(scenario, plan, gone), _rescheduled(scenario, plan, gone)
    except InputError:
        # The only device with the model has left, or the remaining devices have too little memory.
        parts = (f"{way}_{part}" for way in ("replay", "heavy") for part in _PARTS)
        columns = (*parts, "ratio", "ratio_once_known", "throughput_share")
        return {**dict.fromkeys(columns, ""), "note": "cannot go on"}
    throughput = [simulated_samples_per_s(each.plan, scenario) for each in (light, heavy)]
    ways = {"replay": light, "heavy": heavy}
    return {
        **{f"{way}_{part}": getattr(each, part) for way, each in ways.items() for part in _PARTS},
        "ratio": heavy.total_s / light.total_s,
        "ratio_once_known": heavy.known_s / light.known_s,
        "throughput_share": throughput[0] / throughput[1],
        "note": "",
    }


def _replayed(scenario: Scenario, plan: Plan, gone: str) -> Recovery:
    began_s = perf_counter()
    after = replay(plan, scenario, [gone])
    planning_s = perf_counter() - began_s
    migration = migration_between(plan, after, scenario, [gone], backup_holders(plan))
    return Recovery(after, planning_s, travel_s(migration, scenario, after.connections), _round_s(after, scenario))


def _rescheduled(scenario: Scenario, plan: Plan, gone: str) -> Recovery:
    began_s = perf_counter()
    after = replan(plan, scenario, [gone])
    planning_s = perf_counter() - began_s
    both = full_redistribution(plan, after, scenario, [gone], backup_holders(plan))
    migration_s = sum(travel_s(each, scenario, after.connections) for each in both)
    return Recovery(after, planning_s, migration_s, _round_s(after, scenario))


def _round_s(plan: Plan, scenario: Scenario) -> float:
    return step_ends_s(Simulator().run(scenario, plan, None, 1).events)[0]


def replay_variants(scenario: Scenario, plan: Plan) -> list[dict[str, float]]:
    """Return for each device that may leave the throughput after replay, by how replay shifts boundaries.

    Beside replay's own choice there are ``in proportion`` and ``lost layers only``, each always applied.
    ``without backups`` is 1 if the rest of the plan still holds every layer.
    """
    found = []
    for gone in plan.devices:
        try:
            plans = {
                "chosen": replay(plan, scenario, [gone]),
                "in proportion": replay(plan, scenario, [gone], (in_proportion,)),
                "lost layers only": replay(plan, scenario, [gone], (where_they_were,)),
            }
        except InputError:
            continue
        per_s = {name: simulated_samples_per_s(each, scenario) for name, each in plans.items()}
        found.append({**per_s, "without backups": float(_all_held(plan, gone))})
    return found


def _all_held(plan: Plan, gone: str) -> bool:
    """Return whether every stage keeps a replica without the device."""
    stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
    return all(any(gone not in replica.devices for replica in stage.replicas) for stage in stages)
