"""Measures the time to recover from a board's departure: Asteroid's replay against heavy rescheduling.

Recovery lasts from the departure to the end of the repeated rounds (a round is a training step), with either method:

- Detection, `DETECTION_S`.
- Planning: the number of candidates times the time of one on a named machine (`planner.systems.asteroid.policy`).
- Migration of layers over the idle links, simulated.
- The interrupted round once more, with an empty pipeline at its start; and, if the lost board held the only copy of
  its layers, the rounds since the newest complete backup. Backups are sent over the links of the training in every
  round, or as soon as at most one earlier backup is on its way, as with ``--backup-every 1``; their age is simulated.
"""

from dataclasses import dataclass
from statistics import mean

from experiments.benches.result import Row
from experiments.reproductions.comparisons.best_plan import samples_per_s
from planner.adapt.migration import Migration, backup_holders, backup_moves, migration_between
from planner.events.event import Event, EventKind
from planner.plan.plan import Plan
from planner.runs.event_totals import step_ends_s
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.policy import (
    CANDIDATE_S,
    RULE_S,
    counted_replan,
    full_redistribution,
    in_proportion,
    replay,
    where_they_were,
)
from sim.migration import travel_s
from sim.simulator import Simulator
from traces.common.errors import InputError

# Assumption: devices send a heartbeat every 0.25 s; a device that misses four heartbeats in a row counts as gone.
DETECTION_S = 4 * 0.25

# Rounds of the run that measures backups, as a multiple of the rounds that one backup takes, and at least.
BACKUPS, LEAST_ROUNDS = 4, 12

RULES = (in_proportion, where_they_were)


@dataclass(frozen=True, slots=True)
class Backups:
    """Backups of a plan beside its training.

    Attributes:
        share: Throughput with backups, divided by that without.
        rounds: Rounds that one backup takes on idle links.
        age_rounds: Mean number of finished rounds that the newest complete backup lacks.
    """

    share: float
    rounds: float
    age_rounds: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery by one method: the new plan, and the duration of each part in seconds."""

    plan: Plan
    planning_s: float
    migration_s: float
    repeated_s: float

    @property
    def known_s(self) -> float:
        """Return the seconds from the detection of the departure to the end of the recovery."""
        return self.planning_s + self.migration_s + self.repeated_s

    @property
    def total_s(self) -> float:
        """Return the seconds from the departure to the end of the recovery."""
        return DETECTION_S + self.known_s


# Replay, heavy rescheduling, and the plan of heavy rescheduling with replay's moves: each layer straight to its place.
_WAYS = ("replay", "heavy", "direct")
_PARTS = ("planning_s", "migration_s", "repeated_s", "total_s")


def measured_backups(scenario: Scenario, plan: Plan) -> Backups:
    """Return what backups cost a plan, and how old they are, from a simulated run that sends them over the links."""
    moves = backup_moves(plan, scenario)
    if not moves:
        return Backups(1.0, 0.0, 0.0)
    alone_s = plan.global_batch / samples_per_s(plan, scenario)
    rounds = travel_s(Migration(moves), scenario, plan.connections) / alone_s
    steps = max(LEAST_ROUNDS, round(BACKUPS * rounds))
    events = Simulator(backup_every=1).run(scenario, plan, None, steps).events
    ends_s = step_ends_s(events)
    complete_s = _complete_s(events, len(moves))
    # Index of the newest complete backup at the end of each round; a backup of index n is that before round n.
    newest = [max((step for step, at_s in complete_s.items() if at_s <= end_s), default=-1) for end_s in ends_s]
    ages = [number + 1 - step for number, step in enumerate(newest) if step > 0]
    loaded_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
    return Backups(alone_s / loaded_s, rounds, mean(ages) if ages else float(steps))


def _complete_s(events: object, count: int) -> dict[int, float]:
    """Return when all parts of a backup have arrived, by the backup's step."""
    arrivals: dict[int, list[float]] = {}
    for event in events:  # type: ignore[attr-defined]
        if isinstance(event, Event) and event.kind is EventKind.BACKUP and event.arrived_s >= 0:
            arrivals.setdefault(event.step, []).append(event.arrived_s)
    return {step: max(each) for step, each in arrivals.items() if len(each) == count}


def recovery_rows(scenario: Scenario, plan: Plan, place: Row) -> list[Row]:
    """Return a row for the departure of each device of a plan, which begins with the columns of ``place``."""
    backups = measured_backups(scenario, plan)
    return [{**place, "lost": device, **_row(scenario, plan, device, backups)} for device in plan.devices]


def _row(scenario: Scenario, plan: Plan, gone: str, backups: Backups) -> Row:
    is_alone = any(stage.replicas[0].device == gone for stage in plan.stages if len(stage.replicas) == 1)
    lost_rounds = backups.age_rounds if is_alone else 0.0
    common: Row = {"backup_rounds": backups.rounds, "backup_share": backups.share, "lost_rounds": lost_rounds}
    try:
        light = _replayed(scenario, plan, gone, lost_rounds)
        heavy = _rescheduled(scenario, plan, gone, lost_rounds)
        direct = _rescheduled(scenario, plan, gone, lost_rounds, is_direct=True)
    except InputError:
        # The only device has left, or the remaining devices have too little memory.
        parts = (f"{way}_{part}" for way in _WAYS for part in _PARTS)
        columns = (*parts, "ratio", "ratio_once_known", "ratio_without_rounds", "throughput_share")
        return {**common, **dict.fromkeys(columns, ""), "note": "cannot go on"}
    throughput = [samples_per_s(each.plan, scenario) for each in (light, heavy)]
    ways = dict(zip(_WAYS, (light, heavy, direct), strict=True))
    return {
        **common,
        **{f"{way}_{part}": getattr(each, part) for way, each in ways.items() for part in _PARTS},
        "ratio": heavy.total_s / light.total_s,
        "ratio_once_known": heavy.known_s / light.known_s,
        "ratio_without_rounds": (heavy.planning_s + heavy.migration_s) / (light.planning_s + light.migration_s),
        "throughput_share": throughput[0] / throughput[1],
        "note": "",
    }


def _replayed(scenario: Scenario, plan: Plan, gone: str, lost_rounds: float) -> Recovery:
    after = replay(plan, scenario, [gone], RULES)
    migrations = [migration_between(plan, after, scenario, [gone], backup_holders(plan))]
    return _recovery(scenario, after, migrations, RULE_S * len(RULES), lost_rounds)


def _rescheduled(scenario: Scenario, plan: Plan, gone: str, lost_rounds: float, *, is_direct: bool = False) -> Recovery:
    after, candidates = counted_replan(plan, scenario, [gone])
    moved = plan, after, scenario, [gone], backup_holders(plan)
    migrations = (migration_between(*moved),) if is_direct else full_redistribution(*moved)
    return _recovery(scenario, after, migrations, CANDIDATE_S * candidates, lost_rounds)


def _recovery(
    scenario: Scenario,
    after: Plan,
    migrations: "list[Migration] | tuple[Migration, ...]",
    planning_s: float,
    lost: float,
) -> Recovery:
    migration_s = sum(travel_s(each, scenario, after.connections) for each in migrations)
    first_s = step_ends_s(Simulator().run(scenario, after, None, 1).events)[0]
    round_s = after.global_batch / samples_per_s(after, scenario)
    return Recovery(after, planning_s, migration_s, first_s + lost * round_s)


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
        per_s = {name: samples_per_s(each, scenario) for name, each in plans.items()}
        found.append({**per_s, "without backups": float(_all_held(plan, gone))})
    return found


def _all_held(plan: Plan, gone: str) -> bool:
    """Return whether every stage keeps a replica after the device has left."""
    stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
    return all(any(gone not in replica.devices for replica in stage.replicas) for stage in stages)
