"""Measures how long every strategy searches on the fleets of the published planners, and how good its plan is.

Plans are scored by the closed form with which planners were compared in publications
(experiments/benches/sailor/closed_form.py), and by ropebridge's evaluator. A strategy first plans for a few nodes, so
that nothing is compiled while its time is taken. This is processor time, and includes the checks of `make_plan`.

The published planners searched by the closed form. For a fair comparison with their figures, strategy `auto` searches
twice: by ropebridge's evaluator, as users get it, and by the closed form.
"""

import multiprocessing
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from math import ceil, inf
from multiprocessing.connection import Connection
from time import process_time
from typing import Generic, Self, TypeVar

from experiments.benches.planning.planner_fleets import (
    GLOBAL_BATCH,
    PUBLISHED_FLEETS,
    WIDE_FLEETS,
    ZONE,
    PublishedFleet,
    WideFleet,
    fleet_scenario,
    wide_scenario,
)
from experiments.benches.result import BenchResult, Check, Row, at_least, at_most
from experiments.benches.sailor.closed_form import judge
from experiments.benches.sailor.closed_form_tables import JudgeTables, read_judge_tables
from experiments.benches.sailor.measured_files import MeasuredFiles, find_measured_files
from planner.check import check_plan
from planner.plan.plan import Plan
from planner.runs.published_laws import published_law
from planner.scenario.convergence import TrainingMode
from planner.scenario.scenario import Scenario
from planner.scenario.training import FLOAT32_BYTES
from planner.step.evaluate import step_time_s
from planner.systems.auto.objective import Objective
from planner.systems.auto.strategy import plan_for
from planner.systems.regional.loss_plan import TIME, LossGoal
from planner.systems.regional.search import plan_to_loss
from planner.systems.registry import STRATEGIES, make_plan
from traces.common.errors import InputError

Task = TypeVar("Task")
Result = TypeVar("Result")

# Processes are spawned: a forked one would inherit locks that threads hold, but not the threads.
_CONTEXT = multiprocessing.get_context("spawn")


class LimitedProcess(Generic[Task, Result]):
    """A context manager that carries out tasks one after the other in another process, each with a limit.

    The process starts with the first task.

    Args:
        work: A module-level function that takes a task and returns the result; both are pickled.
    """

    def __init__(self, work: Callable[[Task], Result]) -> None:
        self._work = work
        self._is_started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def result(self, task: Task, limit_s: float) -> Result:
        """Return the result of a task.

        Raises:
            TimeoutError: The task takes more than ``limit_s`` seconds of processor time.
            ChildProcessError: The process ended before the task was done.
        """
        if not self._is_started:
            self._start()
        self._ours.send((task, limit_s))
        try:
            result: Result = self._ours.recv()
            return result
        except EOFError:
            self._process.join()
        is_late = self._process.exitcode == -signal.SIGXCPU
        self._stop()
        raise TimeoutError(f"it takes longer than {limit_s:g} s") if is_late else ChildProcessError("its process ended")

    def _start(self) -> None:
        self._ours, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, self._work), daemon=True)
        self._process.start()
        theirs.close()
        self._is_started = True

    def _stop(self) -> None:
        if not self._is_started:
            return
        self._is_started = False
        self._ours.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def _serve(connection: Connection, work: Callable[[Task], Result]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
    try:
        while True:
            task, limit_s = connection.recv()
            # The kernel ends the process at the limit by SIGXCPU.
            resource.setrlimit(resource.RLIMIT_CPU, (ceil(process_time() + limit_s), most_s))
            connection.send(work(task))
    except EOFError:
        return


OURS = "auto"
OURS_BY_CLOSED_FORM = "auto, by the closed form"

# Most processor seconds of a strategy on a fleet, for its search and for scoring its plan. The time of some strategies
# grows with the square of the number of devices.
LIMIT_S, QUICK_LIMIT_S = 120.0, 20.0

# Most seconds of a search for a loss over the smallest wide fleet: it also chooses workers and their exchanges.
WIDE_TO_LOSS_S = 60.0

# The loss is that of this many steps with sums of gradients in every step, by published laws at this many tokens.
OURS_TO_LOSS = "auto, to a loss"
_STEPS_TO_LOSS, _TOKENS = 10_000, 2048

# A small fleet for which a strategy plans once before its time is taken.
WARM_UP = PublishedFleet(4, 12, 0.0, 0.0, 0.0, 0.0)
WARM_UP_BATCH = 64


@dataclass(frozen=True, slots=True)
class PlannerCase:
    """A strategy to measure on a fleet."""

    strategy: str
    fleet: PublishedFleet | WideFleet
    files: MeasuredFiles


def measure_planner(quick: bool, tell: Callable[[str], None], files: MeasuredFiles | None = None) -> BenchResult:
    """Let every strategy plan for every published fleet, and `auto` for wide ones; ``quick`` takes the smallest fleet.

    Raises:
        InputError: No option or variable names the measured files of model and network, or a file is malformed.
    """
    found = files or find_measured_files()
    read_judge_tables(found, ZONE)
    fleets = PUBLISHED_FLEETS[:1] if quick else PUBLISHED_FLEETS
    rows = [
        _row(
            fleet.name,
            "best published planner, carried over",
            fleet.published_search_s,
            judge_per_s=fleet.published_per_s,
            fits="yes",
        )
        for fleet in fleets
    ]
    limit_s = QUICK_LIMIT_S if quick else LIMIT_S
    given_up: dict[str, str] = {}
    with LimitedProcess(plan_and_score) as process:
        for task in _tasks(fleets, found, quick):
            tell(f"{task.fleet.name}: {task.strategy}")
            if task.strategy in given_up:
                rows.append(_row(task.fleet.name, task.strategy, problem=given_up[task.strategy]))
                continue
            try:
                rows.append(process.result(task, limit_s))
            except (TimeoutError, ChildProcessError) as error:
                rows.append(_row(task.fleet.name, task.strategy, problem=str(error)))
                given_up[task.strategy] = f"{error}, on a smaller fleet already"
    return BenchResult(rows, list(_checks(rows, fleets)))


def _tasks(fleets: Sequence[PublishedFleet], files: MeasuredFiles, quick: bool) -> Iterator[PlannerCase]:
    for fleet in fleets:
        yield from (PlannerCase(strategy, fleet, files) for strategy in STRATEGIES)
        if OURS in STRATEGIES:
            yield PlannerCase(OURS_BY_CLOSED_FORM, fleet, files)
    if OURS in STRATEGIES and not quick:
        yield from (PlannerCase(OURS, fleet, files) for fleet in WIDE_FLEETS)
        yield PlannerCase(OURS_TO_LOSS, WIDE_FLEETS[0], files)


def plan_and_score(task: PlannerCase) -> Row:
    """Return the row of a strategy on a fleet; if the strategy finds no plan, the row gives the reason."""
    scenario, row = _scenario(task.fleet, task.files), partial(_row, task.fleet.name, task.strategy)
    _warm_up(task.strategy, task.files)
    start_s = process_time()
    try:
        plan = _plan(task, scenario)
    except InputError as error:
        return row(process_time() - start_s, problem=str(error))
    search_s = process_time() - start_s
    ours_per_s = 1 / step_time_s(plan, scenario)
    if isinstance(task.fleet, WideFleet):
        return row(search_s, ours_per_s)
    try:
        verdict = judge(plan, scenario, _tables(task.files))
    except InputError as error:
        return row(search_s, ours_per_s, problem=str(error))
    return row(search_s, ours_per_s, 1 / verdict.iteration_s, "yes" if verdict.fits else "no")


def _plan(task: PlannerCase, scenario: Scenario) -> Plan:
    if task.strategy == OURS_TO_LOSS:
        return _plan_to_loss(scenario)
    if task.strategy != OURS_BY_CLOSED_FORM:
        return make_plan(task.strategy, scenario)
    tables = _tables(task.files)

    def closed_form_s(plan: Plan) -> float:
        verdict = judge(plan, scenario, tables)
        return verdict.iteration_s if verdict.fits else inf

    plan = plan_for(scenario, Objective(), closed_form_s)
    check_plan(plan, scenario)
    return plan


def _plan_to_loss(scenario: Scenario) -> Plan:
    parameters = scenario.model.parameter_bytes(0, len(scenario.model.layers)) // FLOAT32_BYTES
    law = published_law(parameters, _TOKENS)
    loss = law.loss(TrainingMode("allreduce", scenario.training.global_batch), _STEPS_TO_LOSS)
    plan = plan_to_loss(scenario, LossGoal(TIME, loss, law, assumed=True)).best.plan
    check_plan(plan, scenario)
    return plan


@cache
def _tables(files: MeasuredFiles) -> JudgeTables:
    return read_judge_tables(files, ZONE)


@cache
def _scenario(fleet: PublishedFleet | WideFleet, files: MeasuredFiles) -> Scenario:
    if isinstance(fleet, WideFleet):
        return wide_scenario(fleet, files)
    return fleet_scenario(fleet.name, fleet.a100, fleet.v100, GLOBAL_BATCH, files)


@cache
def _warm_up(strategy: str, files: MeasuredFiles) -> None:
    """Plan and evaluate for a few nodes, which compiles the code of the strategy and of the evaluator."""
    scenario = fleet_scenario("warm-up", WARM_UP.a100, WARM_UP.v100, WARM_UP_BATCH, files)
    # The strategy may find no plan for the few nodes.
    with suppress(InputError):
        step_time_s(make_plan(strategy if strategy in STRATEGIES else OURS, scenario), scenario)


def _row(
    fleet: str,
    strategy: str,
    search_s: float = 0.0,
    ours_per_s: float = 0.0,
    judge_per_s: float = 0.0,
    fits: str = "",
    problem: str = "",
) -> Row:
    return {
        "fleet": fleet,
        "strategy": strategy,
        "search_s": search_s,
        "judge_per_s": judge_per_s,
        "ours_per_s": ours_per_s,
        "fits_judge": fits,
        "problem": problem,
    }


def _checks(rows: Sequence[Row], fleets: Sequence[PublishedFleet]) -> Iterator[Check]:
    for fleet in fleets:
        here = {str(row["strategy"]): row for row in rows if row["fleet"] == fleet.name}
        for name in (each for each in (OURS, OURS_BY_CLOSED_FORM) if each in here):
            row = here[name]
            judged_per_s = float(row["judge_per_s"]) if row["fits_judge"] == "yes" else 0.0
            yield at_least(
                f"{fleet.name}: iterations/s of the plan of {name}, as published planners were judged",
                judged_per_s,
                fleet.bar_per_s,
            )
            yield at_most(f"{fleet.name}: seconds that {name} searches", _search_s(row), fleet.bar_search_s)
        if OURS in here:
            own_per_s = float(here[OURS]["ours_per_s"])
            others = (row for name, row in here.items() if name not in (OURS, OURS_BY_CLOSED_FORM))
            others_per_s = max((float(row["ours_per_s"]) for row in others), default=0.0)
            ratio = own_per_s / others_per_s if others_per_s else float(own_per_s > 0)
            yield at_least(f"{fleet.name}: {OURS} to the best other strategy, by our evaluator", ratio, 1.0)
    wide = {each.name: each.most_search_s for each in WIDE_FLEETS}
    for row in rows:
        if (name := str(row["fleet"])) in wide:
            most_s = WIDE_TO_LOSS_S if row["strategy"] == OURS_TO_LOSS else wide[name]
            yield at_most(f"{name}: seconds that {row['strategy']} searches", _search_s(row), most_s)


def _search_s(row: Row) -> float:
    """Return the duration of a search that found a plan, seconds; infinity for a search that found none."""
    return float(row["search_s"]) if row["ours_per_s"] else inf
