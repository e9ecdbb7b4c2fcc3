"""The executed half of a reproduction: a system and its rivals run for real, beside what the simulator says of them.

A process for each device computes at the profile's pace and moves true bytes over emulated links, under real TCP. The
ratio of the system's throughput to each rival's is taken in both backends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from executor.backend import TorchBackend
from experiments.benches.result import Check, Row
from experiments.reproductions.executed.scaling import scaled
from planner.events.event import EventKind
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.runs.record import RunRecord
from planner.scenario.effects import WIDE_AREA_TCP, Effects
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_policy
from sim.simulator import Simulator

MOST_POINTS = 10.0

# What two cores carry, of all devices together, bytes per second.
_CARRIED = 40e6

Contender = tuple[Plan, str]


@dataclass(frozen=True, slots=True)
class Contest:
    """A system against its rivals in one setting.

    Attributes:
        setting: In words.
        scenario: At its true size.
        contenders: Name to plan and name of a policy; the first is the system.
        steps: Training steps of each run; the first is not counted.
        step_s: What the quickest contender's step is brought to, seconds, with as few bytes as this machine carries.
            Short steps become longer too: every message takes this machine its time. None runs all at true size.
        per_dollar: Whether samples per US dollar count, instead of samples per second.
    """

    setting: str
    scenario: Scenario
    contenders: Mapping[str, Contender]
    steps: int
    step_s: float | None = None
    per_dollar: bool = False


def execute(contest: Contest, tell: Callable[[str], None]) -> list[Row]:
    """Run all contenders in both backends; return a row for each rival.

    Args:
        contest: What is run.
        tell: Takes lines about the progress, and what of the emulation is not as it should be.
    """
    scenario, scale = _reduced(contest)
    simulated, executed = dict[str, float](), dict[str, float]()
    for name, (plan, policy) in contest.contenders.items():
        simulated[name] = _rate(contest, Simulator().run(scenario, plan, make_policy(policy, scenario), contest.steps))
        tell(f"{contest.setting}: {name}")
        backend = TorchBackend("paced", emulator="auto")
        executed[name] = _rate(contest, backend.run(scenario, plan, make_policy(policy, scenario), contest.steps))
    own, *rivals = contest.contenders
    return [
        {
            "setting": f"{contest.setting}; {scale}",
            "system": own,
            "rival": rival,
            "simulated_ratio": simulated[own] / simulated[rival],
            "executed_ratio": executed[own] / executed[rival],
            "points": 100 * (executed[own] / executed[rival] / (simulated[own] / simulated[rival]) - 1),
        }
        for rival in rivals
    ]


def executed_check(rows: Sequence[Row]) -> Check:
    """Hold the ratios that were executed to those that were simulated."""
    worst = max(abs(float(row["points"])) for row in rows)
    return Check("executed ratio to simulated ratio, largest difference in percent", worst, MOST_POINTS, at_most=True)


def _rate(contest: Contest, record: RunRecord) -> float:
    metrics = measure(record)
    if contest.per_dollar:
        return record.plan.global_batch * metrics.steps / metrics.cost_usd
    return metrics.samples_per_s


def _reduced(contest: Contest) -> tuple[Scenario, str]:
    """The scenario as this machine runs it, over links that carry TCP; and in words what was reduced."""
    scenario = replace(contest.scenario, effects=Effects(network=WIDE_AREA_TCP))
    if contest.step_s is None:
        return scenario, "at true size"
    steps = [_step(scenario, plan) for plan, _ in contest.contenders.values()]
    quicker = min(step_s for step_s, _ in steps) / contest.step_s
    smaller = max(1.0, max(size_bytes * quicker / step_s for step_s, size_bytes in steps) / _CARRIED)
    return scaled(scenario, smaller, quicker), f"{smaller:.3g} times fewer bytes, {quicker:.3g} times as quick"


def _step(scenario: Scenario, plan: Plan) -> tuple[float, int]:
    """Seconds and bytes of one step."""
    record = Simulator().run(scenario, plan, None, 2)
    sent = sum(event.size_bytes for event in record.events if event.kind is EventKind.SEND and event.step == 1)
    return measure(record).step_s, sent
