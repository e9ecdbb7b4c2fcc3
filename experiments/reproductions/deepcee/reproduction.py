"""Reproduces DeepCEE's claim (arXiv 2505.15536): 1.3 to 2.8 times the throughput of other systems, across regions.

Nine settings form a Latin square: each cluster is combined with every model and every link once. The tenth setting is
the first one with another order of devices: one device of each region in turn. All runs are simulated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.benches.result import Claim, Reproduction, Row, at_least
from experiments.reproductions.deepcee.scenarios import (
    BASELINES,
    CLUSTERS,
    SLOW_TO_PLAN,
    baseline_throughput,
    deepcee_scenario,
    throughput,
)
from experiments.reproductions.figures import draw_deepcee
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.scenario import Scenario
from planner.systems.deepcee.strategy import Mechanisms, deepcee
from planner.systems.registry import make_policy
from sim.simulator import Simulator
from traces.common.errors import InputError
from traces.generators.presets import preset
from traces.trace import LinkTrace

MODELS = ("gpt-2.7b", "gpt-6.7b", "vit-huge")

# Rate in bits per second, and one-way latency in seconds.
LINKS = ((1e9, 0.01), (0.3e9, 0.03), (0.1e9, 0.06))

STEPS = 3
LEAST_RATIO, LARGEST_RATIO = 1.3, 2.8
FIRST = ("data centres", "gpt-2.7b", *LINKS[0])

MECHANISMS: Mapping[str, Mechanisms] = {
    "grouping": Mechanisms(grouping=False),
    "zero bubble": Mechanisms(zero_bubble=False),
    "latency-aware depth": Mechanisms(latency_aware_depth=False),
}

# The adapter, DeepCEE's policy, is measured with links whose rate drops for good at DROP_AT_S seconds to a share of
# DROPS, and with links that follow a trace of mobile paths. A gain of at least 1 % counts as above 1.
DROP_AT_S = 40.0
LEAST_GAIN = 1.01
DROPS = (0.5, 0.3)
ADAPTER_STEPS = 60
TRACE_PRESET, TRACE_S = "5g-mmwave", 600.0


@dataclass(frozen=True, slots=True)
class Setting:
    """A cluster, a model, the links between regions, and whether devices of all regions are listed in turn."""

    cluster: str
    model: str
    bandwidth_bps: float
    latency_s: float
    mixed: bool = False

    @property
    def scenario(self) -> Scenario:
        """Return the scenario with this cluster, model and links."""
        return deepcee_scenario(self.cluster, self.model, self.bandwidth_bps, self.latency_s, mixed=self.mixed)

    @property
    def title(self) -> str:
        """Return the setting as text."""
        link = f"{self.bandwidth_bps / 1e9:g} Gbit/s, {self.latency_s * 1e3:g} ms"
        return f"{self.cluster}{' in turn' if self.mixed else ''}; {self.model}; {link}"


def reproduce_deepcee(quick: bool, tell: Callable[[str], None]) -> Reproduction:
    """Compare DeepCEE with its baselines, switch off its mechanisms one by one, and run it on changing links."""
    settings = _settings()
    settings = settings[-1:] if quick else settings
    names = [name for name in BASELINES if not (quick and name == SLOW_TO_PLAN)]
    details = [_measured(setting, names, tell) for setting in settings]
    # Ablations are measured in the settings whose plan is a pipeline across regions.
    chosen = [setting for setting, row in zip(settings, details, strict=True) if int(row["regions"]) > 1]
    ablations = [_ablation(setting, tell) for setting in chosen]
    adapted = [] if quick else [_adapter(name, trace, tell) for name, trace in _changing_links().items()]
    ratios = [float(row["ratio_to_best"]) for row in details]
    largest = max(float(row["ratio_to_worst"]) for row in details)
    across = [ratio for ratio, row in zip(ratios, details, strict=True) if int(row["regions"]) > 1]
    gains = [float(row["gain"]) for row in adapted]
    return Reproduction(
        _claims(min(ratios), min(across, default=0.0), largest, gains, len(settings)),
        [*ablations, *({**_no_ablation(), **row} for row in adapted)],
        details,
        [
            # Settings in which one region alone is fastest have no pipeline across regions, and do not count.
            at_least(
                "smallest ratio to the best baseline, plans that cross regions", min(across, default=0.0), LEAST_RATIO
            ),
            at_least("largest ratio to a baseline", largest, LARGEST_RATIO),
            *(
                at_least(f"adapter, {row['setting']}: with / without", float(row["gain"]), LEAST_GAIN)
                for row in adapted
            ),
        ],
        _remarks(details, names),
        partial(draw_deepcee, details, ("deepcee", *names)),
    )


def _settings() -> list[Setting]:
    square = [
        Setting(cluster, model, *LINKS[(row + column) % len(LINKS)])
        for row, cluster in enumerate(CLUSTERS)
        for column, model in enumerate(MODELS)
    ]
    return [*square, Setting(*FIRST, mixed=True)]


def _measured(setting: Setting, names: Sequence[str], tell: Callable[[str], None]) -> Row:
    tell(setting.title)
    scenario = setting.scenario
    plan = deepcee(scenario)
    own = throughput(scenario, plan, STEPS)
    outcomes = {name: baseline_throughput(name, scenario, STEPS) for name in names}
    others = [per_s for per_s, _ in outcomes.values() if per_s > 0]
    return {
        "setting": setting.title,
        "deepcee": own,
        **{name: per_s for name, (per_s, _) in outcomes.items()},
        "ddp_as": outcomes["ddp"][1],
        "ratio_to_best": own / max(others, default=own),
        "ratio_to_worst": own / min(others, default=own),
        "regions": len({scenario.cluster.by_name[device].region for device in plan.devices}),
        "plan": _plan_text(plan),
    }


def _plan_text(plan: Plan) -> str:
    pipeline = plan.pipelines[0]
    stages = (f"{each.end_layer - each.first_layer}x{len(each.replicas)}K{each.in_flight}" for each in pipeline.stages)
    return f"{' '.join(stages)}; M={len(pipeline.microbatches)}"


def _ablation(setting: Setting, tell: Callable[[str], None]) -> Row:
    scenario = setting.scenario
    whole = throughput(scenario, deepcee(scenario), STEPS)
    row: dict[str, str | float] = {"setting": setting.title, "whole": whole}
    for name, mechanisms in MECHANISMS.items():
        tell(f"{setting.title} without {name}")
        try:
            row[f"without {name}"] = throughput(scenario, deepcee(scenario, mechanisms), STEPS)
        except InputError:
            row[f"without {name}"] = 0.0
    return {**row, "without adapter": whole, "gain": 1.0, "decisions": 0}


def _no_ablation() -> Row:
    return {"setting": "", "whole": 0.0, **{f"without {name}": 0.0 for name in MECHANISMS}}


def _changing_links() -> dict[str, LinkTrace]:
    """Return traces for the links between the first two regions, by name: drops of the rate, and mobile paths."""
    whole_bps = FIRST[2]
    times_s = np.array([0.0, DROP_AT_S])
    traces = {
        f"drop to {share:.0%}": LinkTrace(times_s, np.array([whole_bps, share * whole_bps]), 1e6) for share in DROPS
    }
    return {**traces, f"trace {TRACE_PRESET}": preset(TRACE_PRESET, duration_s=TRACE_S, seed=0)}


def _adapter(name: str, trace: LinkTrace, tell: Callable[[str], None]) -> Row:
    cluster, model, bandwidth_bps, latency_s = FIRST
    tell(f"adapter: {name}")
    scenario = deepcee_scenario(cluster, model, bandwidth_bps, latency_s, trace=trace)
    plan = deepcee(scenario)
    without = throughput(scenario, plan, ADAPTER_STEPS)
    record = Simulator().run(scenario, plan, make_policy("deepcee", scenario), ADAPTER_STEPS)
    adapted = measure(record).samples_per_s
    return {
        "setting": f"{cluster}; {model}; {name}",
        "whole": adapted,
        "without adapter": without,
        "gain": adapted / without,
        "decisions": len(record.decisions),
    }


def _claims(least: float, across: float, largest: float, gains: Sequence[float], settings: int) -> list[Claim]:
    where = f"{settings} settings, simulated; clusters, models, batches and links are assumed within the ranges named"
    return [
        Claim("smallest ratio to the strongest baseline, all settings", "1.3x", least, where),
        Claim("the same, where the plan crosses regions", "1.3x", across, where),
        Claim("largest ratio to a baseline", "2.8x", largest, where),
        *(
            Claim("adapter: with / without, the least of all changes of a link", "above 1 (assumed)", least_gain, where)
            for least_gain in sorted(gains)[:1]
        ),
    ]


def _remarks(details: Sequence[Row], names: Sequence[str]) -> list[str]:
    remarks = [
        "Ratios are of samples per second. Assumed: devices, GPT and ViT shapes, batches (64 sequences of 1024 tokens "
        "in microbatches of 2, 256 pictures in microbatches of 8), roofline times, AdamW in 32 bits.",
        "A throughput of 0 says that a baseline does not fit into memory; 'ddp_as' says how data parallelism runs.",
        "The largest ratio is to any baseline that runs, the smallest to the best of them.",
    ]
    alone = [str(row["setting"]) for row in details if int(row["regions"]) == 1]
    if alone:
        remarks.append(
            "One region alone is faster than any pipeline over slow links, and a baseline that chooses its devices "
            f"can find that too: {' | '.join(alone)}."
        )
    missing = [name for name in BASELINES if name not in names]
    if missing:
        remarks.append(f"Left out to be quick: {', '.join(missing)}, and the adapter.")
    return remarks
