"""Fidelity cases of plans by every strategy, and of every policy where it acts: links, slow devices, departures."""

from collections.abc import Iterator
from dataclasses import replace

from experiments.benches.fidelity.case import STEPS_ON_TRACES, Case
from experiments.benches.fidelity.stages import Regions, Stages, pipeline_case, regions_case
from experiments.runs.scenario import choose_scenario
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.effects import WIDE_AREA_TCP, ComputeEffects, Effects, Slowdown
from planner.scenario.faults import Absence, Fault, Hang
from planner.scenario.scenario import Scenario
from planner.systems.registry import STRATEGIES, make_plan

# Number of steps of cases on the ready scenario cloud-edge-end-small.
SMALL_STEPS = 16

# What `ropebridge demo` runs, and the name of this case.
DEMO_SCENARIO, DEMO_STRATEGY, DEMO_POLICY, DEMO_STEPS = "four-sites", "auto", "auto", 50
DEMO = f"{DEMO_SCENARIO}-{DEMO_STRATEGY}-{DEMO_POLICY}"
DEMO_RUNS = 10

# Scenario, strategy of the first plan, policies, and number of steps, in which links change and the policies answer.
LINK_POLICIES = (
    ("two-regions", "megatron", ("depth", "deepcee", "auto"), 50),
    ("cloud-edge-end-small", "megatron", ("depth",), 50),
    (DEMO_SCENARIO, DEMO_STRATEGY, ("deepcee",), DEMO_STEPS),
)

# Three devices that share the batch, of which the second becomes slow during the run.
SLOWED = Regions((2, 1), (8, 8, 8), 0.02, 100e6, parameter_bytes=1_000_000)
SLOW_FROM_S, SLOW_SPEED = 4.0, 0.4

# A pipeline of three stages, of which the second has two replicas.
DEPARTED = Stages([0.01, 0.012, 0.01], [(120e6, 0.01)] * 2, [[1.0], [2.0, 1.0], [1.0]], layers=3, output_bytes=200_000)
LEAVES_S = 3.0
LEAVING = {"replica": "gpu-1-0-1", "stage": "gpu-0-0-0"}
BACKUP_EVERY = 2


def planned_cases() -> list[Case]:
    """Return the cases."""
    strategies = list(_strategies())
    demo = list(_demo())
    links = _answers_to_links({replace(case.plan, strategy="") for case in (*strategies, *demo)})
    return [*strategies, *demo, *links, *_answers_to_slow_devices(), *_answers_to_departures()]


def _strategies() -> Iterator[Case]:
    """Yield a case for every plan that a strategy makes and no earlier strategy has made, on two devices or more."""
    scenario = _ready("cloud-edge-end-small")
    seen: set[Plan] = set()
    for strategy in STRATEGIES:
        plan = make_plan(strategy, scenario)
        alike = replace(plan, strategy="")
        if len(plan.devices) > 1 and alike not in seen:
            seen.add(alike)
            yield Case(f"{scenario.name}-{strategy}", scenario, plan, steps=SMALL_STEPS)


def _demo() -> Iterator[Case]:
    scenario = _ready(DEMO_SCENARIO)
    plan = make_plan(DEMO_STRATEGY, scenario)
    yield Case(f"{DEMO_SCENARIO}-{DEMO_STRATEGY}-none", scenario, plan, steps=DEMO_STEPS)
    yield Case(DEMO, scenario, plan, DEMO_POLICY, DEMO_STEPS, runs=DEMO_RUNS)


def _answers_to_links(seen: set[Plan]) -> Iterator[Case]:
    """Yield each plan with each policy, and without one unless ``seen`` has the plan, in which no strategy is named."""
    for name, strategy, policies, steps in LINK_POLICIES:
        scenario = _ready(name)
        plan = make_plan(strategy, scenario)
        alike = replace(plan, strategy="")
        for policy in policies if alike in seen else ("none", *policies):
            yield Case(f"{name}-{strategy}-{policy}", scenario, plan, policy, steps)
        seen.add(alike)


def _answers_to_slow_devices() -> Iterator[Case]:
    made = regions_case("slowed", "", SLOWED, Synchronisation())
    slowdown = Slowdown("gpu-1", (0.0, SLOW_FROM_S), (1.0, SLOW_SPEED))
    effects = Effects(network=WIDE_AREA_TCP, compute=ComputeEffects(slowdowns=(slowdown,)))
    scenario = replace(made.scenario, effects=effects)
    for strategy, policy in (("ddp", "cannikin"), ("cloudless", "cloudless")):
        plan = make_plan(strategy, scenario)
        for each in ("none", policy):
            yield Case(f"slowed-{strategy}-{each}", scenario, plan, each, SMALL_STEPS)


def _answers_to_departures() -> Iterator[Case]:
    for what, device in LEAVING.items():
        for policy in ("asteroid-replay", "heavy-rescheduling", "auto"):
            yield _lost(f"departed-{what}", Absence(device, LEAVES_S), policy)
    yield _lost("hung-stage", Hang(LEAVING["stage"], LEAVES_S), "asteroid-replay")


def _lost(name: str, fault: Fault, policy: str) -> Case:
    made = pipeline_case(name, policy, DEPARTED, (4,) * 5, [5, 3, 1], "1f1b", steps=STEPS_ON_TRACES)
    scenario = replace(made.scenario, faults=(fault,))
    return replace(made, scenario=scenario, policy=policy, backup_every=BACKUP_EVERY)


def _ready(name: str) -> Scenario:
    return replace(choose_scenario(name), effects=Effects(network=WIDE_AREA_TCP))
