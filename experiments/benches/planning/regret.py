"""Searches for courses of a link on which policy `auto` does harm, and measures how much against never changing a plan.

A course is a list of pieces of constant rate, which repeat. Some are drawn at random; then pieces of the worst ones are
replaced, in some rounds. Two regions train for an hour on each, from the plan for the link's declared rate and from the
one of the region that is faster alone.
"""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from experiments.benches.cases import draw_seeds
from experiments.benches.planning.adaptation_cases import wide_area_links, with_traces
from experiments.benches.result import BenchResult, Row, at_least
from experiments.runs.scenario import choose_scenario
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.scenario import Scenario, within_regions
from planner.step.evaluate import step_time_s
from planner.systems.auto.policy import AutoPolicy
from planner.systems.auto.portfolio import searched_once
from sim.simulator import Simulator
from traces.trace import LinkTrace

SCENARIO = "two-regions"
DURATION_S, QUICK_DURATION_S = 3600.0, 600.0

# Courses that are drawn, and rounds in which as many are changed ones of the worst half so far.
COURSES, ROUNDS = 16, 2
QUICK_COURSES = 2

# Lengths of pieces, seconds, and rates as multiples of the declared one.
LENGTHS_S = (5.0, 20.0, 60.0, 150.0, 400.0)
FACTORS = (0.01, 0.05, 0.25, 0.7, 1.0, 1.5)
FEWEST_PIECES, MOST_PIECES = 2, 8

LEAST_GAIN = 0.98

# A number of steps that no run reaches, since runs end after their duration.
_ENDLESS = 10**9


@dataclass(frozen=True, slots=True)
class Course:
    """Pieces of a link's rate: their lengths, seconds, and their rates as multiples of the declared one."""

    pieces: tuple[tuple[float, float], ...]

    @classmethod
    def draw(cls, random: Random) -> "Course":
        """Return a course of random pieces."""
        count = random.randint(FEWEST_PIECES, MOST_PIECES)
        return cls(tuple(_draw_piece(random) for _ in range(count)))

    def changed(self, random: Random) -> "Course":
        """Return the course with one other piece."""
        at = random.randrange(len(self.pieces))
        return Course((*self.pieces[:at], _draw_piece(random), *self.pieces[at + 1 :]))

    def trace(self, declared_bps: float) -> LinkTrace:
        """Return the trace of a link with a declared rate in bits per second."""
        ends_s = list(accumulate(length_s for length_s, _ in self.pieces))
        rates_bps = [factor * declared_bps for _, factor in self.pieces]
        return LinkTrace([0.0, *ends_s[:-1]], rates_bps, ends_s[-1])  # type: ignore[arg-type]

    def text(self) -> str:
        """Return the pieces as ``seconds x factor``."""
        return " ".join(f"{length_s:g}x{factor:g}" for length_s, factor in self.pieces)


def _draw_piece(random: Random) -> tuple[float, float]:
    return random.choice(LENGTHS_S), random.choice(FACTORS)


def measure_regret(
    quick: bool, tell: Callable[[str], None], count: int | None = None, seed: int | None = None
) -> BenchResult:
    """Search for courses that do harm; measure the policy on each of them.

    Args:
        quick: Whether to draw few courses, and simulate ten minutes of each.
        tell: Function that shows progress.
        count: Number of courses that are drawn; None for `COURSES`.
        seed: Seed of the draw; None for a random one.
    """
    number = count if count is not None else QUICK_COURSES if quick else COURSES
    random = Random(draw_seeds("courses", 1, seed, tell)[0])
    courses = [Course.draw(random) for _ in range(number)]
    duration_s = QUICK_DURATION_S if quick else DURATION_S
    rows: list[Row] = []
    worst: dict[Course, float] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for _ in range(1 + ROUNDS):
            for course, found in zip(courses, pool.map(measure_course, courses, [duration_s] * number), strict=True):
                rows += found
                worst[course] = min(float(row["auto_gain"]) for row in found)
                tell(f"{course.text()}: {worst[course]:.3f}")
            harmful = sorted(worst, key=lambda each: worst[each])[: max(1, number // 2)]
            courses = [random.choice(harmful).changed(random) for _ in range(number)]
    gains = [float(row["auto_gain"]) for row in rows]
    kept = sum(gain >= LEAST_GAIN for gain in gains) / len(gains)
    return BenchResult(
        rows, [at_least("least auto / none", min(gains), LEAST_GAIN), at_least("share of runs above it", kept, 1.0)]
    )


def measure_course(course: Course, duration_s: float) -> list[Row]:
    """Simulate ``duration_s`` seconds of a course with and without the policy; return a row for each start."""
    steady = _without_traces(choose_scenario(SCENARIO))
    (link,) = wide_area_links(steady)
    scenario = with_traces(steady, [course.trace(link.bandwidth_bps)])
    rows: list[Row] = []
    for name, start in starts(steady).items():
        runs = [
            Simulator(duration_s=duration_s).run(scenario, start, policy, _ENDLESS)
            for policy in (None, AutoPolicy(scenario, searched_once))
        ]
        none_per_s, auto_per_s = (measure(run).samples_per_s for run in runs)
        moved_mb = sum(decision.migration.size_bytes for decision in runs[1].decisions) / 1e6
        rows.append(
            {
                "course": course.text(),
                "start": name,
                "none_per_s": none_per_s,
                "auto_gain": auto_per_s / none_per_s,
                "decisions": len(runs[1].decisions),
                "moved_mb": moved_mb,
            }
        )
    return rows


def starts(steady: Scenario) -> dict[str, Plan]:
    """Return the plan for the declared rates, and that of the region whose own plan has the shortest step."""
    alone = [searched_once(within_regions(steady, [region]))[0] for region in steady.cluster.regions]
    return {
        "declared": searched_once(steady)[0],
        "one region": min(alone, key=lambda plan: step_time_s(plan, steady)),
    }


def _without_traces(scenario: Scenario) -> Scenario:
    links = tuple(replace(link, trace=None) for link in scenario.cluster.links)
    return replace(scenario, cluster=replace(scenario.cluster, links=links))
