"""Carries out points in worker processes, and those of a sweep: makes scenario and plan from a point's values."""

import json
import os
import time
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

from experiments.runs.carry_out import bounded, check_length
from experiments.runs.scenario import Ordering, choose_plan
from experiments.sweep.definition import PLAN, SETTINGS, run_length, scenario_path, setting_text, user_file
from experiments.sweep.outcomes import FAILED, OK, Outcome, OutcomeLog
from experiments.sweep.overrides import AlteredDocument, Keys, altered_plan, parse_path
from experiments.sweep.parameters import canonical
from experiments.sweep.points import Point
from experiments.sweep.table import Value, point_metrics
from planner.files.documents import Document
from planner.files.scenario import scenario_in
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_policy
from sim.simulator import Simulator
from traces.common.errors import RopebridgeError

_VARIABLES: Mapping[str, str] = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Limit processes that the block starts to one compute thread each, through environment variables."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(_VARIABLES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Task(Protocol):
    """What is done for each point; it has the data that all points share, and is sent to every worker."""

    @property
    def log(self) -> Path:
        """The folder of the logs."""

    def measure(self, values: Mapping[str, Any]) -> dict[str, Value]:
        """Carry out the point with these values of the parameters; return its metrics.

        Raises:
            RopebridgeError: The values are not valid, or the run fails.
        """


@dataclass(frozen=True, slots=True)
class PointTask:
    """The task of a sweep: folder of the sweep file, settings that no parameter changes, folder of the logs."""

    folder: Path
    common: Mapping[str, Any]
    log: Path

    def measure(self, values: Mapping[str, Any]) -> dict[str, Value]:
        """Simulate the run that a point's values describe; return its metrics."""
        settings = {**self.common, **{name: value for name, value in values.items() if name in SETTINGS}}
        scenario = scenario_of(self, values)
        path = setting_text(settings, PLAN)
        plan = _plan(
            scenario,
            self.folder / path if path is not None else None,
            _name_or_file(settings, "strategy", self.folder),
            setting_text(settings, "schedule"),
            canonical(_changes(values, of_plan=True)),
        )
        policy = make_policy(_name_or_file(settings, "policy", self.folder) or "none", scenario)
        steps, duration_s = bounded(*run_length(settings))
        check_length(scenario, plan, steps, duration_s, on_disk=False)
        return point_metrics(Simulator(duration_s).run(scenario, plan, policy, steps))


@dataclass(frozen=True, slots=True)
class Tally:
    """A worker's report on a portion: numbers of finished points and of failed ones among them, and the time taken."""

    done: int
    failed: int
    wall_s: float


def carry_out_points(task: Task, points: Sequence[Point]) -> Tally:
    """Carry out points one after the other, and write each outcome to the log."""
    log, failed, start_s = _log_of_this_process(task.log), 0, time.perf_counter()
    for point in points:
        outcome = carry_out(task, point)
        failed += outcome.status == FAILED
        log.write(outcome)
    log.keep()
    return Tally(len(points), failed, time.perf_counter() - start_s)


def carry_out(task: Task, point: Point) -> Outcome:
    """Carry out a point; return its outcome, which may be an error."""
    start_s, error, metrics = time.perf_counter(), "", dict[str, Value]()
    try:
        metrics = task.measure(point.values)
    except RopebridgeError as wrong:
        error = str(wrong)
    except Exception:
        # A defect that one combination of values triggers must not end the sweep.
        error = f"this is a defect of ropebridge: {traceback.format_exc()}"
    wall_s = time.perf_counter() - start_s
    return Outcome(point.key, FAILED if error else OK, error, metrics, wall_s, time.time())


def scenario_of(task: PointTask, values: Mapping[str, Any]) -> Scenario:
    """Return the scenario of a point.

    Raises:
        InputError: The point's values do not make a valid scenario.
    """
    named = {**task.common, **values}["scenario"]
    return _scenario(_scenario_path(named, task.folder), canonical(_changes(values, of_plan=False)))


def _changes(values: Mapping[str, Any], *, of_plan: bool) -> dict[str, Any]:
    return {
        name: value for name, value in values.items() if name not in SETTINGS and (_keys(name)[0] == PLAN) == of_plan
    }


def _name_or_file(settings: Mapping[str, Any], name: str, folder: Path) -> str | None:
    text = setting_text(settings, name)
    code = user_file(name, text, folder)
    return text if code is None else str(code)


_log_of_this_process = cache(OutcomeLog)
_scenario_path = cache(scenario_path)


@cache
def _keys(name: str) -> Keys:
    return parse_path(name, "")


@lru_cache(maxsize=256)
def _document(path: Path) -> Document:
    """Read a document; cached, since the points of a sweep share most files."""
    return Document(path)


# Cached, since neighbouring points often share scenario and plan.
@lru_cache(maxsize=32)
def _scenario(path: Path, changes: str) -> Scenario:
    by_keys = {_keys(name): value for name, value in json.loads(changes).items()}
    return scenario_in(AlteredDocument(_document(path), by_keys, _document))


@lru_cache(maxsize=32)
def _plan(scenario: Scenario, path: Path | None, strategy: str | None, schedule: str | None, changes: str) -> Plan:
    plan = choose_plan(scenario, path, strategy, Ordering(schedule))
    by_keys = {_keys(name)[1:]: value for name, value in json.loads(changes).items()}
    return altered_plan(plan, by_keys, scenario) if by_keys else plan


# Seconds of work in a portion: enough to make the cost of handing it over negligible, but little enough that all
# workers end at about the same time.
PORTION_S = 0.5
MOST_IN_PORTION = 200


@dataclass(frozen=True, slots=True)
class Portion:
    """Points that one worker carried out together, and the worker's report; None if the worker died."""

    points: Sequence[Point]
    tally: Tally | None


class Engine(Protocol):
    """Carries out points in worker processes, each of which writes outcomes into its own log."""

    def carry_out(self, task: Task, points: Sequence[Point], *, alone: bool) -> Generator[Portion, None, None]:
        """Carry out all points; yield each portion when it has ended.

        Closing the generator ends all workers.

        Args:
            task: What is done for each point.
            points: The points, in the order in which they are begun.
            alone: Whether each point has its own process, so that the death of a process is due to its point.

        Raises:
            RunError: No worker can be started, or all workers are lost.
        """


class Portioner:
    """Cuts points into portions of about `PORTION_S` seconds, by the time per point of earlier portions.

    The last portions are small, so that all workers end at about the same time.
    """

    def __init__(self, points: Sequence[Point], workers: int) -> None:
        self._points = points
        self._workers = workers
        self._next = 0
        self._point_s = PORTION_S

    @property
    def has_more(self) -> bool:
        """Return whether there are points that are in no portion yet."""
        return self._next < len(self._points)

    def learn(self, tally: Tally) -> None:
        """Set the estimated time per point to that of a finished portion."""
        self._point_s = tally.wall_s / tally.done

    def __iter__(self) -> Iterator[Sequence[Point]]:
        while self.has_more:
            left = len(self._points) - self._next
            share = -(-left // (4 * self._workers))
            count = max(1, min(int(PORTION_S / max(self._point_s, 1e-6)), share, MOST_IN_PORTION))
            self._next += count
            yield self._points[self._next - count : self._next]
