"""Reproduces DeepCEE's claim (arXiv 2505.15536): 1.3 to 2.8 times the throughput of other systems, across regions.

Nine settings form a Latin square: each cluster is combined with every model and every link once. Each is measured in 32
and in 16 bits. Every rival turns its own knobs (`experiments.reproductions.comparisons.contenders`). All runs are
simulated, and the same in every run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from experiments.benches.result import Check, JudgedClaim, Reproduction, Row, at_least, judge_claim
from experiments.reproductions.comparisons.ablation import ablation_rows, without_effect
from experiments.reproductions.comparisons.best_plan import SIMULATED, best_entry, describe, samples_per_s
from experiments.reproductions.comparisons.contenders import CONTENDERS
from experiments.reproductions.comparisons.knobs import arranged, arrangements
from experiments.reproductions.deepcee.adapter import adapter_row, changing_links
from experiments.reproductions.deepcee.scenarios import CLUSTERS, PRECISIONS, deepcee_scenario
from experiments.reproductions.figures import draw_deepcee
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.deepcee.strategy import Mechanisms, deepcee, dynamic_step_time_s
from planner.systems.registry import make_plan
from traces.common.errors import InputError

MODELS = ("gpt-2.7b", "gpt-6.7b", "vit-huge")

# Rate in bits per second, and one-way latency in seconds.
LINKS = ((1e9, 0.01), (0.3e9, 0.03), (0.1e9, 0.06))

OWN = "deepcee"
RIVALS = tuple(name for name in CONTENDERS if name != OWN)

PAPER = "1.3x to 2.8x"
LEAST_RATIO, LARGEST_RATIO = 1.3, 2.8

# A gain of the adapter of at least 1 % counts as above 1.
LEAST_GAIN = 1.01

# Strategies whose plan without knobs is quickly made; the sweep of knobs must not miss it.
SWEPT = ("megatron", "gpipe", "zb-h1-equal", "pipedream")

QUICK_SETTINGS = (7, 9)


@dataclass(frozen=True, slots=True)
class Setting:
    """A cluster, a model, the links between regions, and the number formats of training."""

    cluster: str
    model: str
    bandwidth_bps: float
    latency_s: float
    precision: str

    @property
    def scenario(self) -> Scenario:
        """Return the scenario with this cluster, model, links and precision."""
        ends = (self.bandwidth_bps, self.latency_s)
        return deepcee_scenario(self.cluster, self.model, *ends, precision=self.precision)

    @property
    def title(self) -> str:
        """Return the setting as text."""
        link = f"{self.bandwidth_bps / 1e9:g} Gbit/s, {self.latency_s * 1e3:g} ms"
        return f"{self.cluster}; {self.model}; {link}; {self.precision}"


@dataclass(frozen=True, slots=True)
class _Case:
    """A measured setting: a row of throughputs, and one for each mechanism that is off, or change of a link."""

    setting: Setting
    throughput: Row
    ablations: Sequence[Row]
    adapted: Sequence[Row]
    swept_ratio: float


def settings() -> list[Setting]:
    """Return all settings, those of one precision after the other."""
    return [
        Setting(cluster, model, *LINKS[(row + column) % len(LINKS)], precision)
        for precision in PRECISIONS
        for row, cluster in enumerate(CLUSTERS)
        for column, model in enumerate(MODELS)
    ]


def reproduce_deepcee(quick: bool, tell: Callable[[str], None]) -> Reproduction:
    """Compare DeepCEE with its rivals in every setting, switch off its mechanisms one by one, and change links.

    ``quick`` takes one setting for each precision.
    """
    everything = settings()
    chosen = [everything[index] for index in QUICK_SETTINGS] if quick else everything
    cases = [measured_case(setting, tell) for setting in chosen]
    throughputs = [case.throughput for case in cases]
    ablations = [row for case in cases for row in case.ablations]
    adapted = [row for case in cases for row in case.adapted]
    gains: dict[str, list[float]] = {}
    for row in (*ablations, *adapted):
        gains.setdefault(str(row["mechanism"]), []).append(float(row["gain"]))
    summary = ablation_rows(gains)
    return Reproduction(
        _claims(cases),
        summary,
        [
            *({"part": "throughput", **row} for row in throughputs),
            *({"part": "ablation", **row} for row in ablations),
            *({"part": "adapter", **row} for row in adapted),
        ],
        [_swept(cases)],
        _remarks(throughputs, without_effect(summary), len(everything), quick),
        partial(draw_deepcee, throughputs, RIVALS, (LEAST_RATIO, LARGEST_RATIO)),
    )


def measured_case(setting: Setting, tell: Callable[[str], None]) -> _Case:
    """Measure one setting."""
    tell(setting.title)
    scenario = setting.scenario
    plan = best_entry(OWN, scenario).plan
    assert plan is not None, "DeepCEE has a plan in every setting"
    throughput = _throughput(setting, scenario)
    swept = min(_against_default(name, scenario) for name in SWEPT)
    return _Case(setting, throughput, _ablations(setting, scenario), _adapter(setting, scenario, plan, tell), swept)


def _throughput(setting: Setting, scenario: Scenario) -> Row:
    entries = {name: best_entry(name, scenario) for name in CONTENDERS}
    own = entries.pop(OWN)
    rival = max(entries, key=lambda name: entries[name].samples_per_s)
    best = entries[rival]
    assert own.plan is not None, "DeepCEE has a plan in every setting"
    return {
        "setting": setting.title,
        "precision": setting.precision,
        OWN: own.samples_per_s,
        **{name: entry.samples_per_s for name, entry in entries.items()},
        "best_rival": rival,
        "ratio_to_best": own.samples_per_s / best.samples_per_s if best.plan else inf,
        "regions": len({scenario.cluster.by_name[device].region for device in own.plan.devices}),
        "plan": describe(own.plan, scenario),
        "best_rival_plan": describe(best.plan, scenario) if best.plan else "",
    }


def _against_default(name: str, scenario: Scenario) -> float:
    """Return the throughput of a strategy with its best knobs, divided by that of its plan without knobs."""
    try:
        plan = make_plan(name, scenario)
    except InputError:
        return inf
    return best_entry(name, scenario).samples_per_s / samples_per_s(plan, scenario)


def _ablations(setting: Setting, scenario: Scenario) -> list[Row]:
    """Return a row for each mechanism of the planner: the best throughput of DeepCEE with it, and without it."""
    whole = best_entry(OWN, scenario).samples_per_s
    rows: list[Row] = []
    for mechanism, plans in {
        "groups: every device a stage of its own": _ungrouped(scenario),
        "groups, order and choice of regions: all devices as listed": _made(scenario, Mechanisms(grouping=False)),
        "zero bubble: 1F1B": _made(scenario, Mechanisms(zero_bubble=False)),
        "depths that hide latency: those of 1F1B": _made(scenario, Mechanisms(latency_aware_depth=False)),
    }.items():
        without = max((samples_per_s(plan, scenario) for plan in plans), default=0.0)
        gain = whole / without if without else inf
        rows.append(
            {"setting": setting.title, "mechanism": mechanism, "whole": whole, "without": without, "gain": gain}
        )
    return rows


def _made(scenario: Scenario, mechanisms: Mechanisms) -> list[Plan]:
    try:
        return [deepcee(scenario, mechanisms)]
    except InputError:
        return []


def _ungrouped(scenario: Scenario) -> list[Plan]:
    """Return the best plans in which every device is a stage, of all sets of regions in every order."""
    every = (arranged(scenario, devices, scenario.training.microbatch) for devices in arrangements(scenario))
    plans = [plan for each in every for plan in _made(each, Mechanisms(grouping=False))]
    return sorted(plans, key=lambda plan: dynamic_step_time_s(plan, scenario))[:SIMULATED]


def _adapter(setting: Setting, scenario: Scenario, plan: Plan, tell: Callable[[str], None]) -> list[Row]:
    """Return a row for each change of the first link between regions that the plan uses; none without such a link."""
    ends = _first_wan_ends(plan, scenario)
    if ends is None or setting.precision != PRECISIONS[0]:
        return []
    step_s = plan.global_batch / best_entry(OWN, scenario).samples_per_s
    rows: list[Row] = []
    for name, trace in changing_links(setting.bandwidth_bps, step_s).items():
        tell(f"{setting.title}: {name}")
        change = "drop" if name.startswith("drop") else "trace"
        place = {"setting": setting.title, "mechanism": f"adapter, {change}: none", "link": name}
        rows.append({**place, **adapter_row(scenario, plan, ends, trace)})
    return rows


def _first_wan_ends(plan: Plan, scenario: Scenario) -> frozenset[str] | None:
    regions = list(dict.fromkeys(scenario.cluster.by_name[device].region for device in plan.devices))
    return frozenset(regions[:2]) if len(regions) > 1 else None


def _claims(cases: Sequence[_Case]) -> list[JudgedClaim]:
    where = "simulated; clusters, models, batches and links are assumed within the ranges named"
    claims = []
    for precision in dict.fromkeys(case.setting.precision for case in cases):
        rows = [case.throughput for case in cases if case.setting.precision == precision]
        ratios = [float(row["ratio_to_best"]) for row in rows]
        claims.append(judge_claim(f"{precision}: throughput to the best rival", PAPER, ratios, LEAST_RATIO, where))
        for name in RIVALS:
            runs = [float(row[OWN]) / float(row[name]) for row in rows if float(row[name]) > 0]
            claims.append(judge_claim(f"{precision}: throughput to {name}", PAPER, runs, LEAST_RATIO, where))
    ratios = [float(case.throughput["ratio_to_best"]) for case in cases]
    claims.append(judge_claim("largest ratio to the best rival", "up to 2.8x", ratios, LARGEST_RATIO, where))
    for change in ("drop", "trace"):
        gains = [
            float(row["gain"])
            for case in cases
            for row in case.adapted
            if str(row["mechanism"]).startswith(f"adapter, {change}")
        ]
        title = {"drop": "a link drops for good", "trace": "a link follows a trace, declared by its mean"}[change]
        claims.append(judge_claim(f"adapter: with / without, {title}", "above 1 (assumed)", gains, LEAST_GAIN, where))
    return claims


def _swept(cases: Sequence[_Case]) -> Check:
    """Return the check of the comparison itself: knobs never make a rival slower than its plan without them."""
    name = f"least ratio of the best knobs to none, {', '.join(SWEPT)}"
    return at_least(name, min(case.swept_ratio for case in cases), 1 - 1e-9)


def _remarks(rows: Sequence[Row], inert: Sequence[str], settings: int, quick: bool) -> list[str]:
    alone = [str(row["setting"]) for row in rows if int(row["regions"]) == 1]
    rivals = [str(row["best_rival"]) for row in rows]
    best = ", ".join(f"{name} in {rivals.count(name)}" for name in dict.fromkeys(rivals))
    return [
        "Ratios are of samples per second; measured is the median of the settings. A claim appears in a setting whose "
        "ratio is at least the bar. Assumed: devices, GPT and ViT shapes, batches (64 sequences of 1024 tokens, 256 "
        "pictures), roofline times, AdamW.",
        "A throughput of 0 says that no plan of a rival fits into memory; claims about this rival leave the setting "
        "out.",
        f"The best rival: {best} settings.",
        *([f"DeepCEE itself uses one region alone in {len(alone)} settings: {' | '.join(alone)}."] if alone else []),
        *(f"Mechanism without effect in every setting: {mechanism}." for mechanism in inert),
        *([f"Quick: a sample of {len(rows)} of {settings} settings."] if quick else []),
    ]
