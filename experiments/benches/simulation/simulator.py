"""Compares the speed of the simulator and of the evaluator of step times with a textbook SimPy model."""

import resource
from collections.abc import Callable
from dataclasses import replace
from math import ceil, log
from statistics import median
from time import perf_counter

import numpy as np

from experiments.benches.cases import TRACE_S, wide_area_scenario
from experiments.benches.result import BenchResult, Row, at_least, at_most
from experiments.benches.simulation.yardsticks import PlainPipeline, makespan_s, prepare, times_of
from planner.cost.stage import scheduling_problem
from planner.plan.actions import Action, Kind
from planner.plan.plan import EXPLICIT, Pipeline, Plan, Replica, Stage
from planner.runs.event_totals import step_ends_s
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.effects import ComputeEffects, Effects
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.scenario.training import Training
from planner.schedules.kernel.problem import Orders
from planner.step.compile import compile_step
from planner.step.evaluate import step_time_s
from planner.step.graph import longest_path
from planner.systems.registry import make_plan
from sim.epoch import Epoch, EpochRun
from sim.recorder import Recorder
from sim.simulator import Simulator
from sim.step_gate import StopCondition
from sim.updates.async_updates import AsyncUpdates

SIZES = ((16, 64), (32, 256))
# A pipeline with more and more microbatches: the simulator's time must not grow faster than the number of actions.
GROWTH = ((16, 64), (16, 256), (16, 1024))
REPEATS, QUICK_REPEATS = 9, 3
TURN_S = 0.1
WIDE_AREA_JITTER = 0.03

LEAST_SIMULATOR_SPEEDUP = 15
LEAST_EVALUATOR_SPEEDUP = 1000
LEAST_SPEEDUP_WITH_GRAPH = 100
MOST_DIFFERENCE = 1e-9
MOST_WIDE_AREA_S = 60
MOST_GROWTH = 1.05


def measure_simulator(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Time one step of several pipelines in SimPy, simulator and evaluator, and simulate an hour of 1,024 devices."""
    repeats = QUICK_REPEATS if quick else REPEATS
    rows: list[Row] = []
    checks = []
    for stages, microbatches in SIZES:
        tell(f"{stages} stages, {microbatches} microbatches")
        row = _compare(stages, microbatches, repeats)
        rows.append(row)
        case, differences = row["case"], (row["simulated_difference"], row["evaluated_difference"])
        checks += [
            at_least(f"{case}: simulator over plain SimPy", float(row["simulator_speedup"]), LEAST_SIMULATOR_SPEEDUP),
            at_least(f"{case}: evaluator over plain SimPy", float(row["evaluator_speedup"]), LEAST_EVALUATOR_SPEEDUP),
            at_least(f"{case}: with its graph", float(row["speedup_with_graph"]), LEAST_SPEEDUP_WITH_GRAPH),
            at_most(f"{case}: relative difference of makespans", max(map(float, differences)), MOST_DIFFERENCE),
        ]
    tell("growth")
    checks.append(at_most("exponent of cost over actions", _growth(repeats), MOST_GROWTH))
    tell("1024 devices in 16 regions, an hour")
    wide = _wide_area(quick)
    rows.append(wide)
    if not quick:
        checks += [
            at_most("1024 devices: seconds for an hour", float(wide["simulator_s"]), MOST_WIDE_AREA_S),
            at_least("1024 devices: simulated seconds", float(wide["makespan_s"]), TRACE_S),
        ]
    return BenchResult(rows, checks)


def chain(stages: int, microbatches: int, seed: int = 0) -> tuple[Scenario, Plan]:
    """Return a scenario and its plan: one pipeline of unequal stages and links whose backward is split."""
    random = np.random.default_rng(seed)
    seconds = random.uniform(0.008, 0.012, stages)
    kinds = [f"kind-{stage}" for stage in range(stages)]
    layers = tuple(
        LayerProfile(
            f"layer-{stage}",
            4_000_000,
            1_000_000,
            4_000_000,
            {kinds[stage]: TimeTable((1,), (seconds[stage],), (1.1 * seconds[stage],), (0.9 * seconds[stage],))},
        )
        for stage in range(stages)
    )
    devices = tuple(Device(f"device-{s}", kinds[s], f"region-{s}", 80 * 2**30) for s in range(stages))
    links = tuple(
        Link(f"region-{a}", f"region-{b}", random.uniform(3e9, 16e9), random.uniform(0.0005, 0.006))
        for a in range(stages)
        for b in (a - 1, a + 1)
        if 0 <= b < stages
    )
    training = Training(microbatches, microbatch=1)
    scenario = Scenario("chain", Cluster(devices, links), ModelProfile("chain", layers), training)
    depths = [min(2 * (stages - stage), microbatches) for stage in range(stages)]
    pipeline = Pipeline(
        tuple(Stage(s, s + 1, (Replica(f"device-{s}"),), depths[s]) for s in range(stages)),
        (1,) * microbatches,
        tuple(_split_order(stage, depths[stage], microbatches) for stage in range(stages)),
    )
    return scenario, Plan("chain", "chain", "bench", EXPLICIT, (pipeline,))


def _split_order(stage: int, depth: int, microbatches: int) -> tuple[Action, ...]:
    """Return the 1F1B order of a stage with ``depth`` microbatches in flight and weight right after input gradients."""
    order = [Action(stage, Kind.FORWARD, microbatch) for microbatch in range(depth)]
    for microbatch in range(microbatches):
        order += [Action(stage, Kind.BACKWARD_INPUT, microbatch), Action(stage, Kind.BACKWARD_WEIGHT, microbatch)]
        if microbatch + depth < microbatches:
            order.append(Action(stage, Kind.FORWARD, microbatch + depth))
    return tuple(order)


def _compare(stages: int, microbatches: int, repeats: int) -> Row:
    scenario, plan = chain(stages, microbatches)
    pipeline = plan.pipelines[0]
    problem = scheduling_problem(pipeline, scenario)
    orders = Orders.from_actions(pipeline.orders)
    prepared = prepare(problem, orders)
    times_s = times_of(problem, orders, prepared)
    compile_step(plan, scenario)
    epoch_run = _epoch_run(scenario, plan)
    plain, simulated, evaluated, with_graph, compiled = _timings(
        repeats,
        lambda: PlainPipeline(problem, pipeline.orders).makespan_s(),
        lambda: _epoch_run(scenario, plan).run(),
        lambda: longest_path(prepared.graph, prepared.sequence, prepared.acting, *times_s),
        lambda: makespan_s(problem, orders),
        # The undecorated function, which does not cache plans.
        lambda: compile_step.__wrapped__(plan, scenario),
    )
    epoch_run.run()
    makespan = PlainPipeline(problem, pipeline.orders).makespan_s()
    return {
        "case": f"{stages}x{microbatches}",
        "actions": prepared.graph.actions,
        "messages": prepared.graph.messages,
        "makespan_s": makespan,
        "plain_s": plain,
        "simulator_s": simulated,
        "evaluator_s": evaluated,
        "evaluator_with_graph_s": with_graph,
        "compile_plan_s": compiled,
        "simulator_speedup": plain / simulated,
        "evaluator_speedup": plain / evaluated,
        "speedup_with_graph": plain / with_graph,
        "simulated_difference": abs(epoch_run.now_s - makespan) / makespan,
        "evaluated_difference": abs(step_time_s(plan, scenario) - makespan) / makespan,
        "events": prepared.graph.actions + prepared.graph.messages,
        "memory_mib": _memory_mib(),
    }


def _timings(repeats: int, *ways: Callable[[], object]) -> list[float]:
    """Return the median time of a call of each program, seconds.

    The programs take turns of `TURN_S` seconds, so that a slow moment of the machine affects all of them.
    """
    counts = [max(1, ceil(TURN_S / _seconds(way, 1))) for way in ways]
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats):
        for way, count, taken in zip(ways, counts, seconds, strict=True):
            taken.append(_seconds(way, count))
    return [median(taken) for taken in seconds]


def _seconds(way: Callable[[], object], count: int) -> float:
    """Return the mean time of ``count`` calls after a first call that is not timed, seconds."""
    way()
    start = perf_counter()
    for _ in range(count):
        way()
    return (perf_counter() - start) / count


def _epoch_run(scenario: Scenario, plan: Plan) -> EpochRun:
    """Return the simulation, with its full record, of one step of a plan."""
    return EpochRun(
        scenario, Epoch(plan), None, StopCondition(1), Recorder(plan.devices), AsyncUpdates(plan.synchronisation, 1)
    )


def _growth(repeats: int) -> float:
    """Return the exponent e with which the simulator's time grows in proportion to ``actions ** e``."""
    cases = [chain(stages, microbatches) for stages, microbatches in GROWTH]
    seconds = _timings(repeats, *(lambda case=case: _epoch_run(*case).run() for case in cases))
    actions = [compile_step(plan, scenario).graph.actions for scenario, plan in cases]
    return log(seconds[-1] / seconds[0]) / log(actions[-1] / actions[0])


def _wide_area(quick: bool) -> Row:
    """Simulate at least an hour of 1,024 devices with jitter on each action; with ``quick`` only one step."""
    scenario = replace(wide_area_scenario(), effects=Effects(compute=ComputeEffects(jitter=WIDE_AREA_JITTER)))
    plan = make_plan("megatron", scenario)
    compile_step(plan, scenario)
    # One simulated step shows how many steps make an hour; the evaluator ignores that pipelines share links.
    first_s = step_ends_s(Simulator().run(scenario, plan, None, 1).events)[-1]
    steps = 1 if quick else int(TRACE_S / first_s) + 1
    start = perf_counter()
    record = Simulator().run(scenario, plan, None, steps)
    taken = perf_counter() - start
    graph = compile_step(plan, scenario).graph
    return {
        "case": "1024 devices",
        "actions": graph.actions * steps,
        "messages": graph.messages * steps,
        "makespan_s": step_ends_s(record.events)[-1],
        "simulator_s": taken,
        "events": len(record.events),
        "memory_mib": _memory_mib(),
    }


def _memory_mib() -> float:
    """Return the peak memory of this process, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
