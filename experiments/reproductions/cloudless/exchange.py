"""What rarer exchanges gain on a slow WAN: ASGD-GA and MA against ASGD, in the simulator.

Asynchronous pipelines wait for the WAN only at the bound on their staleness. Two bounds are measured: one exchange may
be under way while the next steps are done, as `planner.systems.cloudless.strategy` has it; and none, where
nobody begins a step before the last exchange has arrived. For the second one, with T_c the compute of a step and tau
the time of an exchange::

    speed-up of f steps between exchanges = (T_c + tau) / (T_c + tau / f)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from experiments.benches.result import Row
from experiments.reproductions.cloudless.rental import run_for
from experiments.reproductions.cloudless.settings import RESNET_18, SMALL_CNN, server_scenario
from experiments.runs.scenario import choose_scenario
from planner.plan.plan import Plan, Synchronisation
from planner.runs.metrics import Metrics
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.cloudless.strategy import EXCHANGE_STEPS, longest_exchange_s, with_exchanges
from planner.systems.registry import make_plan

# A multiple of every number of steps between exchanges.
STEPS = 256
QUICK_STEPS = 128


@dataclass(frozen=True, slots=True)
class Trained:
    """A model on two servers.

    Attributes:
        name: With the samples of a region's step.
        scenario: It and its servers.
    """

    name: str
    scenario: Scenario


def exchange_rows(quick: bool, tell: Callable[[str], None]) -> list[Row]:
    """Return speed-up and bytes of each method, for each number of steps between exchanges."""
    rows: list[Row] = []
    for trained in _trained(quick):
        tell(f"exchanges of {trained.name}")
        scenario, plan = trained.scenario, make_plan("greedy", trained.scenario)
        steps = QUICK_STEPS if quick else STEPS
        every_step = run_for(scenario, with_exchanges(plan, "asgd", 1), steps)
        waiting = run_for(scenario, _waiting(plan, 1), steps)
        compute_s = step_time_s(plan, scenario)
        exchange_s = longest_exchange_s(plan, scenario)
        for every in EXCHANGE_STEPS:
            sums, means = (
                run_for(scenario, with_exchanges(plan, method, every), steps) for method in ("asgd-ga", "ma")
            )
            rows.append(
                {
                    "model": trained.name,
                    "compute_s": compute_s,
                    "exchange_s": exchange_s,
                    "every": every,
                    "asgd_ga": _speedup(sums, every_step),
                    "ma": _speedup(means, every_step),
                    "waiting": _speedup(run_for(scenario, _waiting(plan, every), steps), waiting),
                    "formula": (compute_s + exchange_s) / (compute_s + exchange_s / every),
                    "bytes_ratio": every_step.wan_bytes / sums.wan_bytes,
                    "staleness": sums.staleness,
                }
            )
    return rows


def _trained(quick: bool) -> list[Trained]:
    small = Trained("small-cnn, 32", server_scenario(SMALL_CNN, "cpu-core", 32))
    sizes = (128,) if quick else (128, 256, 512)
    large = [Trained(f"resnet-18, {size}", server_scenario(RESNET_18, "cpu-server", size)) for size in sizes]
    return [small, *large] if quick else [Trained("digits-mlp, 32", choose_scenario("digits")), small, *large]


def _waiting(plan: Plan, every: int) -> Plan:
    return replace(plan, synchronisation=Synchronisation("asgd-ga", interval_steps=every, staleness_bound=0))


def _speedup(run: Metrics, before: Metrics) -> float:
    return run.samples_per_s / before.samples_per_s
