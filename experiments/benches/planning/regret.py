"""Searches for courses of a link on which policy `auto` does harm, and measures how much against never changing a plan.

A course is a list of pieces of constant rate, which repeat. Some are drawn at random; then follow rounds, each with as
many courses, in which one piece of one of the worst courses so far is replaced. Two regions with a device each train
for an hour on every course, from the plan for the link's declared rate and from the one of the region that is faster
alone. The scenario is `alike` of the bench of adaptation, without its third region: messages may be compressed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import geometric_mean

from experiments.benches.cases import draw_seeds
from experiments.benches.kept import KeptResults
from experiments.benches.planning.adaptation_cases import LEAST_GAIN, run_for, scenarios, wide_area_links, with_traces
from experiments.benches.planning.adaptation_traces import DURATION_S
from experiments.benches.result import BenchResult, Check, Row, at_least
from experiments.sweep.engines.local import process_pool, results_in_order, usable_cores
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.scenario import Scenario, within_regions
from planner.step.evaluate import step_time_s
from planner.systems.auto.policy import AutoPolicy
from planner.systems.auto.portfolio import searched_once
from traces.trace import LinkTrace

SCENARIO = "alike"

# Courses that are drawn, and rounds of replaced pieces.
COURSES, ROUNDS = 16, 2
QUICK_COURSES, QUICK_ROUNDS = 2, 0

# Lengths of pieces, seconds, and rates as multiples of the declared one.
LENGTHS_S = (5.0, 20.0, 60.0, 150.0, 400.0)
FACTORS = (0.01, 0.05, 0.25, 0.7, 1.0, 1.5)
FEWEST_PIECES, MOST_PIECES = 2, 8

# Bar beside `LEAST_GAIN`: the least geometric mean over the courses that were drawn at random.
LEAST_DRAWN_GAIN = 1.0


@dataclass(frozen=True, slots=True)
class Course:
    """A link's rate over time.

    Attributes:
        pieces: Length, seconds, and rate, as a multiple of the declared one, of each piece.
    """

    pieces: tuple[tuple[float, float], ...]

    @classmethod
    def draw(cls, random: Random) -> "Course":
        """Return a course of random pieces."""
        count = random.randint(FEWEST_PIECES, MOST_PIECES)
        return cls(tuple(_draw_piece(random) for _ in range(count)))

    def changed(self, random: Random) -> "Course":
        """Return the course with another piece in place of one of its own."""
        at = random.randrange(len(self.pieces))
        piece = self.pieces[at]
        while piece == self.pieces[at]:
            piece = _draw_piece(random)
        return Course((*self.pieces[:at], piece, *self.pieces[at + 1 :]))

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
    quick: bool,
    tell: Callable[[str], None],
    count: int | None = None,
    seed: int | None = None,
    keep: Path | None = None,
) -> BenchResult:
    """Search for courses that do harm; measure the policy on each of them.

    Args:
        quick: Whether to draw few courses, and replace no pieces.
        tell: Function that shows progress.
        count: Number of courses that are drawn, and that each round adds; None for the usual number.
        seed: Seed of the draw; None for a random one.
        keep: Folder of the results of each course, which are not measured again; None to keep none.
    """
    measure_each = partial(kept_course, KeptResults(keep))
    number = count if count is not None else QUICK_COURSES if quick else COURSES
    random = Random(draw_seeds("courses", 1, seed, tell)[0])
    gains: dict[Course, float] = {}
    rows: list[Row] = []
    with process_pool(usable_cores()) as pool:
        for place in range(1 + (QUICK_ROUNDS if quick else ROUNDS)):
            courses = choose_courses(random, number, gains)
            for course, found in zip(courses, results_in_order(pool, measure_each, courses), strict=True):
                rows += [{"round": place, **row} for row in found]
                gains[course] = min(float(row["auto_gain"]) for row in found)
                tell(f"round {place}, {course.text()}: {gains[course]:.3f}")
    return BenchResult(rows, checks(rows))


def choose_courses(random: Random, number: int, gains: dict[Course, float]) -> list[Course]:
    """Return ``number`` new courses: random ones or, if ``gains`` has some, changed ones of the worse half of these."""
    worse = sorted(gains, key=lambda each: gains[each])[: max(1, len(gains) // 2)]
    chosen: list[Course] = []
    while len(chosen) < number:
        course = random.choice(worse).changed(random) if worse else Course.draw(random)
        if course not in gains and course not in chosen:
            chosen.append(course)
    return chosen


def checks(rows: list[Row]) -> list[Check]:
    """Return the checks of the gains of `auto`, which are its throughput divided by that of the plan it starts with."""
    drawn = [float(row["auto_gain"]) for row in rows if row["round"] == 0]
    return [
        at_least("least auto / none", min(float(row["auto_gain"]) for row in rows), LEAST_GAIN),
        at_least("courses drawn at random: auto / none, mean", geometric_mean(drawn), LEAST_DRAWN_GAIN),
    ]


def kept_course(kept: KeptResults, course: Course, duration_s: float = DURATION_S) -> list[Row]:
    """Return the rows of one course, measured unless they have been kept."""
    return kept.rows(f"{course.text()}, {duration_s:g} s", lambda: measure_course(course, duration_s))


def measure_course(course: Course, duration_s: float = DURATION_S) -> list[Row]:
    """Simulate ``duration_s`` seconds of a course with and without the policy; return a row for each start."""
    steady = two_regions()
    (link,) = wide_area_links(steady)
    scenario = with_traces(steady, [course.trace(link.bandwidth_bps)])
    rows: list[Row] = []
    for start, plan in starts(steady).items():
        runs = [run_for(duration_s, scenario, plan, policy) for policy in (None, AutoPolicy(scenario, searched_once))]
        none_per_s, auto_per_s = (measure(run).samples_per_s for run in runs)
        rows.append(
            {
                "course": course.text(),
                "start": start,
                "none_per_s": none_per_s,
                "auto_gain": auto_per_s / none_per_s,
                "decisions": len(runs[1].decisions),
                "moved_mb": sum(decision.migration.size_bytes for decision in runs[1].decisions) / 1e6,
            }
        )
    return rows


def two_regions() -> Scenario:
    """Return the scenario, in which the link has its declared rate."""
    whole = next(scenario for scenario in scenarios() if scenario.name == SCENARIO)
    return within_regions(whole, whole.cluster.regions[:2])


def starts(steady: Scenario) -> dict[str, Plan]:
    """Return the plan for the declared rates and, if it is another one, the best plan of a single region."""
    alone = [searched_once(within_regions(steady, [region]))[0] for region in steady.cluster.regions]
    best = min(alone, key=lambda plan: step_time_s(plan, steady))
    declared = searched_once(steady)[0]
    return {"declared": declared} if best == declared else {"declared": declared, "one region": best}
