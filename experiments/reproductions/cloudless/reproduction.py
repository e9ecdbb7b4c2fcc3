"""Reproduces Cloudless-Training's claims (arXiv 2303.05330): the cost, and the speed on a slow WAN.

The accuracy is that of real training (`experiments.reproductions.cloudless.executed`).
"""

from collections.abc import Callable, Sequence
from functools import partial

from experiments.benches.result import Check, JudgedClaim, Reproduction, Row, at_most, judge_claim
from experiments.reproductions.cloudless.measurements import (
    QUICK_RENTAL_STEPS,
    RENTAL_STEPS,
    exchange_rows,
    rental_rows,
    run_for,
)
from experiments.reproductions.cloudless.settings import GENERATIONS, rental_scenario
from experiments.reproductions.comparisons.ablation import ablation_rows, without_effect
from experiments.reproductions.figures import draw_cloudless
from planner.systems.cloudless.strategy import with_exchanges
from planner.systems.registry import make_plan

# Published figures: the range of the saved share of the cost, and the largest speed-up.
PAPER_SAVINGS = (0.092, 0.24)
PAPER_SPEEDUP = 1.7

MOST_RUN_TIME_CHANGE = 0.03
WORST_FORMULA_ERROR = 0.02
WORST_SPEEDUP_FORMULA_ERROR = 0.10

_REMARKS = (
    "Assumed: the schedule's formula; GPUs of Google Cloud's list at its prices of 2023, as many for rent in both "
    "regions; ResNet-18 at the datasheets' speeds; 100 Mbit/s at 25 ms that vary by 13 %; bytes between regions cost "
    "nothing, both plans send the same.",
    "The saving depends on the setting, and jumps with whole GPUs: where the newer ones have most of the data there is "
    "little or nothing to give back, where the older ones have it the newer ones would mostly wait, and more is saved "
    "than published.",
    "Updates in every step cost time only where an exchange takes longer than a step: one exchange under way hides it "
    "otherwise. Without any under way (waiting) the speed-up is (T_c + tau) / (T_c + tau / f).",
)


def reproduce_cloudless(quick: bool, tell: Callable[[str], None]) -> Reproduction:
    """Measure cost and speed in the simulator; ``quick`` takes fewer settings and shorter runs."""
    rental, exchange = rental_rows(quick, tell), exchange_rows(quick, tell)
    summary = ablation_rows(_gains(rental, exchange))
    return Reproduction(
        [*_rental_claims(rental), *_speedup_claims(exchange)],
        summary,
        _details(rental, exchange, _ablations(quick)),
        [*_rental_checks(rental), *_exchange_checks(exchange)],
        [*_REMARKS, *(f"Mechanism without effect in every setting: {each}." for each in without_effect(summary))],
        partial(draw_cloudless, rental, exchange, (PAPER_SAVINGS, PAPER_SPEEDUP)),
    )


def _rental_claims(rows: Sequence[Row]) -> list[JudgedClaim]:
    savings = [100 * float(row["saving"]) for row in rows]
    where = "GPU generations, 4 or 8 of each, data 1:1, 2:1, 1:2; all assumed but the ratios"
    least, most = (100 * share for share in PAPER_SAVINGS)
    return [
        judge_claim(
            "cost saved at the same run time, %, the least published", f"from {least:g} %", savings, least, where
        ),
        judge_claim("the same, the most published", f"up to {most:g} %", savings, most, where),
    ]


def _speedup_claims(rows: Sequence[Row]) -> list[JudgedClaim]:
    """Return a claim for each method: its largest speed-up over all numbers of steps between exchanges."""
    where = "a model and its samples in a region; WAN of 100 Mbit/s, servers assumed"
    return [
        judge_claim(claim, f"up to {PAPER_SPEEDUP:g}x", _largest(rows, column), PAPER_SPEEDUP, where)
        for claim, column in {
            "speed-up of ASGD-GA over ASGD, one exchange under way": "asgd_ga",
            "speed-up of MA over ASGD, one exchange under way": "ma",
            "speed-up of ASGD-GA over ASGD, training waits for every exchange": "waiting",
        }.items()
    ]


def _largest(rows: Sequence[Row], column: str) -> list[float]:
    """Return the largest figure of each model."""
    models = dict.fromkeys(row["model"] for row in rows)
    return [max(float(row[column]) for row in rows if row["model"] == model) for model in models]


def _gains(rental: Sequence[Row], exchange: Sequence[Row]) -> dict[str, list[float]]:
    """Return for each mechanism the gain in samples per dollar, or in samples per second, in each setting."""
    updates = [float(row["asgd_ga"]) for row in exchange if row["every"] == 1]
    return {
        "elastic scheduling: every GPU": [1 / (1 - float(row["saving"])) for row in rental],
        "accumulation over f steps: 1": [
            most / one for most, one in zip(_largest(exchange, "asgd_ga"), updates, strict=True)
        ],
    }


def _rental_checks(rows: Sequence[Row]) -> list[Check]:
    slower = max(float(row["run_time_change"]) for row in rows)
    error = max(abs(float(row["saving"]) - float(row["saving_by_formula"])) for row in rows)
    return [
        at_most("run time added, worst share", slower, MOST_RUN_TIME_CHANGE),
        at_most("saving simulated and by formula, worst difference", error, WORST_FORMULA_ERROR),
    ]


def _exchange_checks(rows: Sequence[Row]) -> list[Check]:
    error = max(abs(float(row["waiting"]) / float(row["formula"]) - 1) for row in rows)
    bytes_error = max(abs(float(row["bytes_ratio"]) / float(row["every"]) - 1) for row in rows)
    return [
        at_most("speed-up and formula, worst difference", error, WORST_SPEEDUP_FORMULA_ERROR),
        at_most("WAN bytes fall by f, worst difference", bytes_error, 0.0),
    ]


def _ablations(quick: bool) -> list[Row]:
    """Return a row for the whole system in one setting, and a row with each mechanism off."""
    scenario = rental_scenario(GENERATIONS[0], 8, (1, 1))
    elastic, greedy = make_plan("cloudless", scenario), make_plan("greedy", scenario)
    plans = {
        "cloudless": elastic,
        "elastic scheduling off: every GPU": greedy,
        "synchronisation strategy off: asgd": with_exchanges(elastic, "asgd", 1),
        "both off": with_exchanges(greedy, "asgd", 1),
    }
    rows: list[Row] = []
    for name, plan in plans.items():
        steps = QUICK_RENTAL_STEPS if quick else RENTAL_STEPS
        run = run_for(scenario, plan, steps)
        rows.append(
            {
                "plan": name,
                "samples_per_s": run.samples_per_s,
                "usd_per_million_samples": 1e6 * run.cost_usd / (steps * plan.global_batch),
                "wan_gb_per_million_samples": run.wan_bytes / 1e9 * 1e6 / (steps * plan.global_batch),
            }
        )
    return rows


def _details(rental: Sequence[Row], exchange: Sequence[Row], ablations: Sequence[Row]) -> list[Row]:
    """Return a row for each measurement."""
    parts = (
        ("cost", rental, ("generations", "units", "data")),
        ("speed", exchange, ("model", "every")),
        ("ablation", ablations, ("plan",)),
    )
    rows: list[Row] = []
    for part, measured, keys in parts:
        for row in measured:
            setting = "; ".join(f"{key} {row[key]}" for key in keys)
            figures = {key: value for key, value in row.items() if key not in keys}
            rows.append({"part": part, "setting": setting, **figures})
    return rows
