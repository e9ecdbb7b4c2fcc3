"""Reproduces Asteroid's claims (arXiv 2408.08015, MobiCom 2024) on throughput and recovery, on Jetson boards on a LAN.

`experiments.reproductions.asteroid.settings` describes the settings, and which of them are assumed. Every rival turns
its own knobs (`experiments.reproductions.comparisons.contenders`). All runs are simulated, and the same in every run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean, median

from experiments.benches.result import JudgedClaim, Reproduction, Row, at_most, judge_claim
from experiments.reproductions.asteroid.recovery import recovery_rows, replay_variants
from experiments.reproductions.asteroid.settings import BATCHES, CLUSTERS, PRECISIONS, edge_models, edge_scenario
from experiments.reproductions.asteroid.throughput import (
    ALL_BOARDS,
    DATA_PARALLEL,
    HYBRID,
    PIPELINES,
    RIVALS,
    ClosedFormErrors,
    ablation_rows_of,
    closed_form_errors,
    describe_errors,
    own_errors,
    ratio_to,
    throughput_row,
)
from experiments.reproductions.comparisons.ablation import ablation_rows, without_effect
from experiments.reproductions.figures import draw_asteroid
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_plan

# Number of random pipelines on which the closed form is checked.
INSTANCES, QUICK_INSTANCES = 1000, 100

LEAST_TO_PARALLEL = 12.2
LEAST_TO_HYBRID = 2.1
LEAST_RECOVERY = 14.0
LEAST_THROUGHPUT_SHARE = 0.9

WHERE = "Jetson Nano, TX2 and Xavier NX on a 100 Mbit/s LAN; numbers of boards, batches and inputs assumed"

# Title, rivals of which the fastest counts, the paper's figure, the ratio from which on the claim appears, and the
# columns: of plans on any boards, or on all boards.
COMPARED: Sequence[tuple[str, Sequence[str], str, float, str]] = (
    ("A: throughput to data parallelism (ddp)", DATA_PARALLEL, "up to 12.2x", LEAST_TO_PARALLEL, ""),
    ("A: to pipeline parallelism (gpipe or zb-h1-equal)", PIPELINES, "up to 12.2x", LEAST_TO_PARALLEL, ""),
    ("A: to the faster of both", (*DATA_PARALLEL, *PIPELINES), "up to 12.2x", LEAST_TO_PARALLEL, ""),
    ("A: all boards in use, to data parallelism", DATA_PARALLEL, "up to 12.2x", LEAST_TO_PARALLEL, ALL_BOARDS),
    ("A: all boards in use, to pipeline parallelism", PIPELINES, "up to 12.2x", LEAST_TO_PARALLEL, ALL_BOARDS),
    ("B: to the best other hybrid pipeline", HYBRID, "up to 2.1x", LEAST_TO_HYBRID, ""),
    *((f"B: to {name}", (name,), "up to 2.1x", LEAST_TO_HYBRID, "") for name in HYBRID),
    ("to the best of all rivals", RIVALS, "not claimed; 1 assumed", 1.0, ""),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on a cluster of boards, with a batch and the number formats of training."""

    precision: str
    model: str
    cluster: str
    batch: int

    @property
    def scenario(self) -> Scenario:
        """Return the scenario of this setting."""
        return edge_scenario(self.model, CLUSTERS[self.cluster], self.batch, self.precision)

    @property
    def place(self) -> Row:
        """Return the columns that say where a row was measured."""
        return {"model": self.model, "cluster": self.cluster, "batch": self.batch, "precision": self.precision}


@dataclass(frozen=True, slots=True)
class _Case:
    """The rows of one setting, and the errors of the closed forms; departures are measured in one precision."""

    setting: Setting
    throughput: Row
    ablations: Sequence[Row]
    losses: Sequence[Row]
    errors: Row


def settings() -> list[Setting]:
    """Return all settings, those of one precision after the other."""
    return [Setting(*each) for each in product(PRECISIONS, edge_models(), CLUSTERS, BATCHES)]


def quick_settings() -> list[Setting]:
    """Return a sample of the settings: every model in one precision, on the smallest cluster with the small batch."""
    return [each for each in settings() if (each.precision, each.cluster, each.batch) == ("fp32", "4 boards", 32)]


def reproduce_asteroid(quick: bool, tell: Callable[[str], None]) -> Reproduction:
    """Measure every setting and every departure; ``quick`` takes a sample of the settings."""
    everything = settings()
    chosen = quick_settings() if quick else everything
    cases = [measured_case(setting, tell) for setting in chosen]
    losses = [row for case in cases for row in case.losses]
    ablations = [row for case in cases for row in case.ablations]
    gains: dict[str, list[float]] = {}
    for row in ablations:
        gains.setdefault(str(row["mechanism"]), []).append(float(row["gain"]))
    summary = ablation_rows(gains)
    errors = closed_form_errors(QUICK_INSTANCES if quick else INSTANCES)
    throughputs = [{**case.setting.place, **case.throughput} for case in cases]
    recovered = [row for row in losses if not row["note"]]
    return Reproduction(
        _claims(cases, recovered),
        summary,
        [
            *({"part": "throughput", **row} for row in throughputs),
            *({"part": "ablation", **row} for row in ablations),
            *({"part": "recovery", **row} for row in losses),
        ],
        # An oracle: on links of their own, the corrected closed form is a lower bound on the exact time.
        [
            at_most(
                "corrected closed form to exact time on links of their own, largest error", max(errors.corrected), 1e-9
            )
        ],
        [
            *_remarks(cases, losses, without_effect(summary)),
            *_closed_form_remarks(cases, errors),
            *([f"Quick: a sample of {len(chosen)} of {len(everything)} settings."] if quick else []),
        ],
        partial(draw_asteroid, throughputs, recovered, (LEAST_TO_PARALLEL, LEAST_TO_HYBRID, LEAST_RECOVERY)),
    )


def measured_case(setting: Setting, tell: Callable[[str], None]) -> _Case:
    """Measure one setting."""
    tell(", ".join(map(str, setting.place.values())))
    scenario = setting.scenario
    throughput = throughput_row(scenario)
    ablations = ablation_rows_of(scenario)
    losses: list[Row] = []
    errors: Row = {}
    if setting.precision == PRECISIONS[0]:
        plan = make_plan("asteroid", scenario)
        losses = recovery_rows(scenario, plan, setting.place)
        ablations += _replay_rows(losses, replay_variants(scenario, plan))
        errors = own_errors(scenario)
    return _Case(setting, throughput, [{**setting.place, **row} for row in ablations], losses, errors)


def _replay_rows(losses: Sequence[Row], variants: Sequence[dict[str, float]]) -> list[Row]:
    """Return a row for each mechanism of replay and each departure."""
    rows: list[Row] = []
    for row in losses:
        if not row["note"]:
            light_s = float(row["replay_total_s"])
            for mechanism, way in {
                "replay: heavy rescheduling": "heavy",
                "replay, its plan: that of a new search": "direct",
            }.items():
                rows.append({"mechanism": mechanism, **_gain(1 / light_s, 1 / float(row[f"{way}_total_s"]))})
    for after in variants:
        chosen = after["chosen"]
        rows += [
            {"mechanism": "replay, boundary shift: lost layers only", **_gain(chosen, after["lost layers only"])},
            {"mechanism": "replay, ours, choice of shift: in proportion", **_gain(chosen, after["in proportion"])},
            {"mechanism": "backups: none", **_gain(1.0, after["without backups"])},
        ]
    return rows


def _gain(whole: float, without: float) -> dict[str, float]:
    return {"whole": whole, "without": without, "gain": whole / without if without else float("inf")}


def _claims(cases: Sequence[_Case], lost: Sequence[Row]) -> list[JudgedClaim]:
    claims: list[JudgedClaim] = []
    for precision in dict.fromkeys(case.setting.precision for case in cases):
        rows = [case.throughput for case in cases if case.setting.precision == precision]
        for title, names, paper, bar, where in COMPARED:
            ratios = [ratio for row in rows if (ratio := ratio_to(row, names, where)) is not None]
            claims.append(judge_claim(f"{title}, {precision}", paper, ratios, bar, WHERE))
    for title, column, paper, bar in (
        ("C: recovery time, heavy rescheduling to replay, all charged", "ratio", "14x", LEAST_RECOVERY),
        ("C: the same once the departure is known", "ratio_once_known", "14x", LEAST_RECOVERY),
        ("C: the same, planning and migration alone", "ratio_without_rounds", "14x", LEAST_RECOVERY),
        ("C: throughput after replay to a full replan", "throughput_share", "comparable", LEAST_THROUGHPUT_SHARE),
    ):
        values = [float(row[column]) for row in lost]
        claims.append(judge_claim(title, paper, values, bar, f"{WHERE}; a setting is a departure"))
    return claims


def _remarks(cases: Sequence[_Case], losses: Sequence[Row], inert: Sequence[str]) -> Iterator[str]:
    rivals = [str(case.throughput["best_rival"]) for case in cases]
    counts = ", ".join(f"{name} in {rivals.count(name)}" for name in dict.fromkeys(rivals))
    recovered = [row for row in losses if not row["note"]]
    best = max(recovered, key=lambda row: float(row["ratio"]))
    yield (
        "Ratios are of samples per second; measured is the median of the settings. A claim appears in a setting whose "
        "ratio is at least the bar. Rivals without a plan that fits into memory are left out of a setting."
    )
    yield f"The best rival: {counts} settings."
    one = sum(int(case.throughput["boards"]) == 1 for case in cases)
    yield f"In {one} of {len(cases)} settings Asteroid's best plan is one board alone."
    for way in ("replay", "heavy"):
        parts = ", ".join(
            f"{part} {float(best[f'{way}_{part}_s']):.3g} s" for part in ("planning", "migration", "repeated")
        )
        yield f"Recovery with the largest ratio ({best['model']}, {best['lost']} leaves), {way}: {parts}."
    backed = [row for row in losses if float(row["backup_rounds"])]
    if backed:
        rounds, shares = ([float(row[key]) for row in backed] for key in ("backup_rounds", "backup_share"))
        ages = [float(row["lost_rounds"]) for row in backed if float(row["lost_rounds"])]
        yield (
            f"A backup takes {min(rounds):.2g} to {max(rounds):.2g} rounds on idle links ({median(rounds):.2g} in the "
            f"median); with backups throughput falls to {median(shares):.2f} in the median, and a departure repeats "
            f"{median(ages):.2g} finished rounds in the median, with both methods."
        )
    slower = sum(float(row["ratio"]) < 1 for row in recovered)
    yield (
        f"After {slower} of {len(recovered)} departures replay takes longer than heavy rescheduling; "
        f"{len(losses) - len(recovered)} departures take a plan's only device, or leave too little memory."
    )
    yield from (f"Mechanism without effect in every setting: {mechanism}." for mechanism in inert)


def _closed_form_remarks(cases: Sequence[_Case], errors: ClosedFormErrors) -> Iterator[str]:
    for form in ("published", "corrected"):
        own = [float(error) for case in cases for name, error in case.errors.items() if name.endswith(form)]
        if own:
            said = describe_errors(own)
            yield f"Over {len(own)} plans here the {form} closed form is off the simulated first step by {said}."
    dominated = [error for error, is_so in zip(errors.corrected, errors.transfer_dominates, strict=True) if is_so]
    yield (
        f"Over {len(errors.published)} random pipelines on links of their own the published closed form is off by "
        f"{describe_errors(errors.published)}, the corrected one by {describe_errors(errors.corrected)}; where a "
        f"transfer dominates, which it corrects, by {describe_errors(dominated)}."
    )
    yield f"On these, depths P - p make a round {mean(errors.plain_depth_ratios) - 1:.1%} longer in the mean."
    yield (
        "On this LAN a board in the middle sends activations on and gradients back over one interface, where the "
        "corrected form counts on links of their own: it promises too much there, as the published one too little."
    )
