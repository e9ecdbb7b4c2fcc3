"""Compares the gains of policies that the simulator predicts with those of real, paced runs over emulated links.

The *gain* is the throughput with a policy divided by that without, over equally many steps from the same plan. Policy
`auto` runs in cases of the bench of adaptation (`experiments.benches.planning.adaptation_cases`), five minutes each
from the best static plan; further pairs of strategy and policy run in the scenario `two-regions`, whose link slows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from executor.backend import TorchBackend, choose_emulator
from experiments.benches.planning.adaptation_cases import drawn, run_for, usable_cases
from experiments.benches.planning.adaptation_traces import DEVELOP, HELD_OUT
from experiments.benches.planning.hindsight import starting_plans
from experiments.benches.result import BenchResult, Check, Row, at_least, at_most
from experiments.runs.scenario import choose_scenario
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.runs.record import Backend
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_plan, make_policy
from sim.simulator import Simulator

# Number of cases of the bench of adaptation, and how long each lasts without a policy. At most half are such that the
# simulated policy changes nothing: they show whether the real one does.
COUNT = 6
DURATION_S = 300.0

# Numbers of devices of a case's first plan: with fewer there is one link at most, and with more they take turns on the
# cores of a small machine.
DEVICES = range(3, 5)

# Strategies of first plans and policies in `SLOWING`. `depth` changes only how many microbatches are in flight; the
# other policies also move layers. With every plan these steps last until the link's rate has recovered.
SLOWING = "two-regions"
GAINING = (("megatron", "depth"), ("pipedream", "depth"))
MOVING = (("deepcee", "deepcee"), ("megatron", "auto"))
SLOWING_STEPS = 50

# Bars.
LEAST_REAL_GAIN, LEAST_SLOWING_GAIN, WORST_DIFFERENCE = 0.97, 1.05, 0.05


def measure_real_gains(
    quick: bool, tell: Callable[[str], None], count: int | None = None, seed: int | None = None
) -> BenchResult:
    """Run plans with and without policies in both backends.

    Args:
        quick: Whether to run only the scenario whose link slows, whatever the other arguments are.
        tell: Function that shows progress.
        count: Number of cases of the bench of adaptation; None for `COUNT`.
        seed: Seed of their draw; None for a random one.
    """
    real = TorchBackend("paced", emulator=choose_emulator("auto", tell), tell=tell)
    wanted = 0 if quick else COUNT if count is None else count
    slowing = _told(_slowing(real), tell)
    adapted = _told(_drawn(real, tell, wanted, seed), tell) if wanted else []
    return BenchResult([*slowing, *adapted], checks(slowing, adapted, wanted))


def _slowing(real: Backend) -> Iterator[Row]:
    scenario = choose_scenario(SLOWING)
    for strategy, policy in (*GAINING, *MOVING):
        trial = _Trial(scenario, strategy, policy, make_plan(strategy, scenario), SLOWING_STEPS)
        yield trial.row(simulated=trial.gain(Simulator()), real=trial.gain(real))


def _drawn(real: Backend, tell: Callable[[str], None], count: int, seed: int | None) -> Iterator[Row]:
    """Yield the rows of ``count`` cases, the first that are possible in an order drawn at random."""
    # All cases are drawn, since it takes a search and a simulation to know which are possible.
    found = usable_cases((DEVELOP, HELD_OUT), tell)
    left, still = count, count // 2
    for case in drawn(found, len(found), seed, tell):
        if not left:
            return
        scenario = case.scenario
        plan = next(iter(starting_plans(scenario, DURATION_S)))
        steps = measure(run_for(DURATION_S, scenario, plan)).steps
        trial = _Trial(scenario, f"{case.pair.name} ({case.half})", "auto", plan, steps)
        if len(plan.devices) not in DEVICES:
            tell(f"{trial.name}: the plan uses {len(plan.devices)} devices; left out")
            continue
        simulated = trial.gain(Simulator())
        if not simulated.changes:
            if not still:
                tell(f"{trial.name}: nothing changes, as in {count // 2} cases before; left out")
                continue
            still -= 1
        yield trial.row(simulated, trial.gain(real))
        left -= 1


@dataclass(frozen=True, slots=True)
class _Gain:
    """The gain of a policy in one backend, a ratio, the throughput without it, and its changes."""

    gain: float
    none_per_s: float
    changes: int
    moves: int


@dataclass(frozen=True, slots=True)
class _Trial:
    """A number of steps of a plan, with and without a policy."""

    scenario: Scenario
    case: str
    policy: str
    plan: Plan
    steps: int

    @property
    def name(self) -> str:
        return f"{self.scenario.name}, {self.case}"

    def gain(self, backend: Backend) -> _Gain:
        plain = measure(backend.run(self.scenario, self.plan, None, self.steps)).samples_per_s
        record = backend.run(self.scenario, self.plan, make_policy(self.policy, self.scenario), self.steps)
        moves = sum(bool(decision.migration.moves) for decision in record.decisions)
        return _Gain(measure(record).samples_per_s / plain, plain, len(record.decisions), moves)

    def row(self, simulated: _Gain, real: _Gain) -> Row:
        own: dict[str, str | float | int] = {
            "case": self.name,
            "policy": self.policy,
            "devices": len(self.plan.devices),
            "steps": self.steps,
        }
        gains = {"simulated": asdict(simulated), "real": asdict(real)}
        return own | {f"{name}_{key}": value for name, gain in gains.items() for key, value in gain.items()}


def _told(rows: Iterable[Row], tell: Callable[[str], None]) -> list[Row]:
    """Return the rows; tell each when it is there."""
    found = []
    for row in rows:
        found.append(row)
        gains = f"gain {row['simulated_gain']:.3f} simulated, {row['real_gain']:.3f} real"
        tell(f"{row['case']}, policy {row['policy']}: {gains}")
    return found


def checks(slowing: Sequence[Row], adapted: Sequence[Row], wanted: int) -> list[Check]:
    """Return the checks of the scenario whose link slows, and of so many cases of adaptation as were wanted."""
    gaining = [min(float(row["simulated_gain"]), float(row["real_gain"])) for row in slowing[: len(GAINING)]]
    moves = sum(int(row["simulated_moves"]) + int(row["real_moves"]) for row in slowing)
    found = [
        at_least(f"{SLOWING}: least gain of policy depth, simulated or real", min(gaining), LEAST_SLOWING_GAIN),
        at_least(f"{SLOWING}: changes that move layers", moves, 1),
        at_most(f"{SLOWING}: worst difference of simulated and real gain", _worst(slowing), WORST_DIFFERENCE),
    ]
    if wanted:
        found.append(at_least("cases of adaptation: runs", len(adapted), wanted))
    if adapted:
        least = min(float(row["real_gain"]) for row in adapted)
        found += [
            at_least("cases of adaptation: least real gain of policy auto", least, LEAST_REAL_GAIN),
            at_most(
                "cases of adaptation: worst difference of simulated and real gain", _worst(adapted), WORST_DIFFERENCE
            ),
        ]
    return found


def _worst(rows: Sequence[Row]) -> float:
    return max(abs(float(row["simulated_gain"]) - float(row["real_gain"])) for row in rows)
