"""Reproduces Cannikin's claims: the training time that unequal shares and an adaptive batch save on unlike GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from experiments.benches.result import JudgedClaim, Reproduction, Row, at_most, judge_claim
from experiments.reproductions.architectures import MODELS
from experiments.reproductions.cannikin.training import (
    MACHINES,
    NOISE_CURVES,
    SYSTEMS,
    Setting,
    Trained,
    adaptive_learned,
    base_scenario,
    fixed,
)
from experiments.reproductions.comparisons.ablation import ablation_rows, without_effect
from experiments.reproductions.figures import draw_cannikin
from planner.systems.cannikin.goodput import CANDIDATES
from planner.systems.cannikin.strategy import cannikin

# Assumed: rates of the network between machines; the ablations and the figure use the first one.
NETWORKS_BPS = (10e9, 25e9)
MIDDLE = "middle"

# The published figures: the share of each system's time that Cannikin saves, and the largest error of a prediction.
LEAST_SAVED = {"ddp": 0.85, "adaptdl": 0.52}
MOST_ERROR_RATIO = 0.05

_QUICK = (("A", "resnet50"), ("B", "resnet18"))
_QUICK_CURVES = (MIDDLE, "high")
_QUICK_CANDIDATES = 12

_REMARKS = (
    "Step times are simulated, with roofline times of the published architectures; PyTorch's buckets of 25 MiB overlap "
    "with backward for every system.",
    "Assumed: machines, network and PCI Express; first batches are those of the papers that published the models (128, "
    "256, 32), and a batch grows to 32 times that; 100 equal parts of progress, of which Cannikin spends the first two "
    "learning with the first batch.",
    "Assumed: the noise scale rises tenfold: from 0.5, 2 or 8 first batches (low, middle, high). All systems know it; "
    "AdaptDL also knows what every step takes.",
    "A setting is a model, a cluster, a network and a noise curve; measured is the median of the settings. A saving "
    "appears in a setting that saves at least the published share; where the batch never changes, no error of a "
    "choice counts. What is saved against DDP rests on the first batch and on the noise, both assumed.",
)


_WHERE = "models on clusters of unlike GPUs; network, first batch and noise curve assumed; simulated"


@dataclass(frozen=True, slots=True)
class _Case:
    """One setting, trained by all systems.

    Attributes:
        network_bps: Rate of each machine's interface, bits per second.
        trained: Maps each system to its training.
        error_anywhere: Largest relative error of the step times, over all candidate batches, that Cannikin's model
            predicts at the end of the run.
    """

    cluster: str
    network_bps: float
    setting: Setting
    trained: dict[str, Trained]
    error_anywhere: float

    @property
    def name(self) -> str:
        return f"{self.setting.scenario.model.name} on cluster {self.cluster}"

    def saves(self, system: str) -> float:
        """Return the share of a system's training time that Cannikin saves."""
        return 1 - self.trained["cannikin"].time_s / self.trained[system].time_s

    @property
    def error(self) -> float:
        """Return the largest relative error of a predicted step time that a choice of batch was based on."""
        return max(map(abs, self.trained["cannikin"].errors), default=0.0)

    def row(self) -> Row:
        of_ddp = {name: each.time_s / self.trained["ddp"].time_s for name, each in self.trained.items()}
        return {
            "part": "training",
            "cluster": self.cluster,
            "network_gbps": self.network_bps / 1e9,
            "model": self.setting.scenario.model.name,
            "noise": self.setting.curve,
            "lb_bsp_of_ddp": of_ddp["lb-bsp"],
            "adaptdl_of_ddp": of_ddp["adaptdl"],
            "cannikin_of_ddp": of_ddp["cannikin"],
            "saved_of_ddp_percent": 100 * self.saves("ddp"),
            "saved_of_adaptdl_percent": 100 * self.saves("adaptdl"),
            "last_batch_adaptdl": self.trained["adaptdl"].batches[-1],
            "last_batch_cannikin": self.trained["cannikin"].batches[-1],
            "error_percent": 100 * self.error,
            "error_all_batches_percent": 100 * self.error_anywhere,
        }


def reproduce_cannikin(quick: bool, tell: Callable[[str], None]) -> Reproduction:
    """Train every model on both clusters with every system, and compare Cannikin's savings with its claims.

    ``quick`` takes one model for each cluster, one network, two noise curves and fewer candidate batches.
    """
    places = _QUICK if quick else [(cluster, model) for cluster in MACHINES for model in MODELS]
    networks, curves = (NETWORKS_BPS[:1], _QUICK_CURVES) if quick else (NETWORKS_BPS, tuple(NOISE_CURVES))
    count = _QUICK_CANDIDATES if quick else CANDIDATES
    cases: list[_Case] = []
    ablations: list[Row] = []
    for cluster, model in places:
        for network_bps in networks:
            tell(f"cannikin: {model} on cluster {cluster}, {network_bps / 1e9:g} Gbit/s")
            scenario = base_scenario(cluster, model, network_bps)
            made = [_train(cluster, network_bps, Setting(scenario, curve, count)) for curve in curves]
            cases += made
            if network_bps == NETWORKS_BPS[0]:
                ablations += _ablations(next(case for case in made if case.setting.curve == MIDDLE))
    drawn = [case for case in cases if case.setting.curve == MIDDLE and case.network_bps == NETWORKS_BPS[0]]
    gains: dict[str, list[float]] = {}
    for row in ablations:
        gains.setdefault(str(row["mechanism"]), []).append(float(row["gain"]))
    summary = ablation_rows(gains)
    inert = [f"Mechanism without effect in every setting: {mechanism}." for mechanism in without_effect(summary)]
    if quick:
        count_all = len(MACHINES) * len(MODELS) * len(NETWORKS_BPS) * len(NOISE_CURVES)
        inert.append(f"Quick: a sample of {len(cases)} of {count_all} settings.")
    times_s = {case.name: {system: each.time_s for system, each in case.trained.items()} for case in drawn}
    batches = {case.name: {system: each.batches for system, each in case.trained.items()} for case in drawn}
    return Reproduction(
        _claims(cases),
        summary,
        [*(case.row() for case in cases), *ablations],
        # AdaptDL may keep the batch of DDP, and knows the exact time of each step.
        [
            at_most(
                "AdaptDL's time to that of DDP, largest ratio",
                max(case.trained["adaptdl"].time_s / case.trained["ddp"].time_s for case in cases),
                1.0,
            )
        ],
        [*_REMARKS, *inert],
        partial(draw_cannikin, times_s, batches),
    )


def _train(cluster: str, network_bps: float, setting: Setting) -> _Case:
    trained = {name: train(setting) for name, train in SYSTEMS.items()}
    trained["cannikin"], learned = adaptive_learned(setting)
    errors = (learned.predicted_s(batch) / learned.simulated_s(batch) - 1 for batch in setting.candidates)
    return _Case(cluster, network_bps, setting, trained, max(map(abs, errors)))


def _ablations(case: _Case) -> list[Row]:
    """Return a row for each mechanism: the time to the target without it, divided by that of the whole system."""
    without_overlap, _ = adaptive_learned(case.setting, overlap=False)
    ways = {
        "batch by goodput: the first batch": fixed(case.setting, cannikin),
        "shares by OptPerf: equal shares": case.trained["adaptdl"],
        "overlap of sums with backward, known: not known": without_overlap,
    }
    whole_s = case.trained["cannikin"].time_s
    return [
        {
            "part": "ablation",
            "cluster": case.cluster,
            "model": case.setting.scenario.model.name,
            "mechanism": mechanism,
            "gain": each.time_s / whole_s,
            "last_batch": each.batches[-1],
        }
        for mechanism, each in ways.items()
    ]


def _claims(cases: Sequence[_Case]) -> list[JudgedClaim]:
    middle = [case for case in cases if case.setting.curve == MIDDLE]
    claims = []
    for system, share in LEAST_SAVED.items():
        paper = f"up to {100 * share:g} %"
        for among, which in ((cases, "all settings"), (middle, "middle noise curve")):
            saved = [100 * case.saves(system) for case in among]
            claim = f"time to the target saved against {system}, percent, {which}"
            claims.append(judge_claim(claim, paper, saved, 100 * share, _WHERE))
    for claim, errors in {
        "largest error of a predicted step time that a choice of batch rested on, percent": [
            case.error for case in cases if case.trained["cannikin"].errors
        ],
        "the same over all candidate batches, by what was known at the end, percent": [
            case.error_anywhere for case in cases
        ],
    }.items():
        percent, paper = [100 * error for error in errors], f"below {100 * MOST_ERROR_RATIO:g} %"
        claims.append(judge_claim(claim, paper, percent, 100 * MOST_ERROR_RATIO, _WHERE, below=True))
    return claims
