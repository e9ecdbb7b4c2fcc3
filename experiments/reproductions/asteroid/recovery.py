"""Measures the time to recover from a board's departure: Asteroid's replay against heavy rescheduling.

Recovery lasts from the departure to the end of the repeated round (a round is a training step). It consists of
detection, as long as in the simulator; planning, measured on this machine, which is faster than a board; migration of
layers; and the interrupted round once more, with an empty pipeline at its start. Migration and round are simulated.
"""

from dataclasses import dataclass
from time import perf_counter

from experiments.benches.result import Row
from experiments.reproductions.asteroid.throughput import simulated_samples_per_s
from planner.adapt.migration import backup_holders, migration_between
from planner.plan.plan import Plan
from planner.runs.metrics import step_ends_s
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.policy import full_redistribution, in_proportion, replan, replay, where_they_were
from sim.migration import travel_s
from sim.simulator import Simulator
from traces.common.errors import InputError

# Assumption: devices send a heartbeat every 0.25 s; a device that misses four heartbeats in a row counts as gone.
DETECTION_S = 4 * 0.25


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery by one policy: the new plan, and the duration of each part."""

    plan: Plan
    planning_s: float
    migration_s: float
    round_s: float

    @property
    def known_s(self) -> float:
        """Return the seconds from the detection of the departure to the end of the recovery."""
        return self.planning_s + self.migration_s + self.round_s

    @property
    def total_s(self) -> float:
        """Return the seconds from the departure to the end of the recovery."""
        return DETECTION_S + self.known_s


_PARTS = ("planning_s", "migration_s", "round_s", "total_s")


def recovery_rows(scenario: Scenario, plan: Plan, place: Row) -> list[Row]:
    """Return a row for the departure of each device of a plan, which begins with the columns of ``place``."""
    return [{**place, "lost": device, **_row(scenario, plan, device)} for device in plan.devices]


def _row(scenario: Scenario, plan: Plan, gone: str) -> Row:
    try:
        light, heavy = (_recovery(scenario, plan, gone, heavy=heavy) for heavy in (False, True))
    except InputError:
        # The only device has left, or the remaining devices have too little memory.
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


def _recovery(scenario: Scenario, plan: Plan, gone: str, *, heavy: bool) -> Recovery:
    began_s = perf_counter()
    after = (replan if heavy else replay)(plan, scenario, [gone])
    planning_s = perf_counter() - began_s
    change = (plan, after, scenario, [gone], backup_holders(plan))
    migrations = full_redistribution(*change) if heavy else [migration_between(*change)]
    migration_s = sum(travel_s(each, scenario, after.connections) for each in migrations)
    round_s = step_ends_s(Simulator().run(scenario, after, None, 1).events)[0]
    return Recovery(after, planning_s, migration_s, round_s)


def replay_variants(scenario: Scenario, plan: Plan) -> list[dict[str, float]]:
    """Return the throughput after the departure of each device, by the way in which replay moves stage boundaries.

    The keys are ``chosen``, for replay's own choice between both ways, ``in proportion`` and ``lost layers only``. The
    value of ``without backups`` is 1 if the remaining devices still hold every layer, else 0.
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
    """Return whether every stage keeps a replica after the device has left."""
    stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
    return all(any(gone not in replica.devices for replica in stage.replicas) for stage in stages)
