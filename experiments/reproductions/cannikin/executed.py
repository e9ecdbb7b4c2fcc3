"""Trains a classifier for real with each system on unequal devices, and compares the times to a target.

All systems train the same layers, from the same initial parameters, on the same samples in the same order. Gradients,
sums and the noise scale are real; each action of a process lasts as long as the profile of its device says, since the
processes share one machine. Nothing of the noise is assumed.

The devices are the GPUs of the paper's cluster A. Assumptions: the ratios of their times per sample are those of their
peak rates in 32 bits, and each step has a fixed part that is the same on all of them; both are longer than on the real
GPUs, so that the actual computation of the small model is hidden.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from scipy.special import stdtrit
from torch import nn

from executor.backend import TorchBackend
from executor.training.models.loading import load_with_sizes
from experiments.benches.result import BenchResult, Check, Row, at_most
from experiments.models.digits import build
from planner.adapt.adaptation import NOISE_ESTIMATOR
from planner.adapt.policy import Policy
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import BatchLimits, Optimizer, Training
from planner.systems.cannikin.policy import AdaptdlPolicy, CannikinPolicy, LbBspPolicy
from planner.systems.cannikin.strategy import adaptdl, plan_of_samples

# Seconds of forward and backward for one sample, by device; and the fixed part of a step.
SAMPLE_S: Mapping[str, float] = {"a5000": 0.8e-3, "a4000": 1.16e-3, "p4000": 4.2e-3}
FIXED_S = 8e-3

# The passes of a layer: forward, input gradient, weight gradient; each takes the same part of the time.
_PASSES = 3

LARGEST_BATCH = 512

_ARGUMENTS: dict[str, Any] = {"width": 128, "depth": 4}
MODEL = ModelCode(Path(__file__).parents[2] / "models" / "digits.py", _ARGUMENTS)

# The target: the mean loss of the last samples, as many as about one epoch has.
TARGET_LOSS, WINDOW_SAMPLES = 0.1, 1438


@dataclass(frozen=True, slots=True)
class Setting:
    """A first batch, samples, and the learning rate that suits it; the number of steps is enough for the target.

    Attributes:
        learning_rate: Size of an update relative to the gradient, without unit.
        fixed_steps: Number of steps of systems that keep the first batch.
        adaptive_steps: Number of steps of systems that change it.
    """

    first_batch: int
    learning_rate: float
    fixed_steps: int
    adaptive_steps: int


# The fixed part of a step weighs much in the small first batch, and little in the other one.
SETTINGS = (Setting(8, 0.005, 1300, 800), Setting(32, 0.02, 420, 420))

# Number of runs of each system in each setting, each with another seed.
SEEDS, QUICK_SEEDS = 8, 3

# Each system: its policy; all begin with the same even shares, which DDP keeps.
POLICIES: Mapping[str, Callable[[Scenario], Policy] | None] = {
    "ddp": None,
    "lb-bsp": LbBspPolicy,
    "adaptdl": AdaptdlPolicy,
    "cannikin": CannikinPolicy,
}

# Published shares of the rivals' training time that Cannikin saves.
CLAIMED: Mapping[str, float] = {"ddp": 0.85, "adaptdl": 0.52}

_MOST_ERROR_PERCENT = 15.0
_CONFIDENCE = 0.95


def digits_scenario(setting: Setting, seed: int) -> Scenario:
    """Return the training of the classifier on unequal devices; parameters and data order depend on ``seed``."""
    sizes = load_with_sizes(MODEL, seed).sizes
    parts = _PASSES * len(sizes)

    def table(sample_s: float) -> TimeTable:
        part_s = tuple((FIXED_S + samples * sample_s) / parts for samples in (1, LARGEST_BATCH))
        return TimeTable((1, LARGEST_BATCH), part_s, part_s, part_s)

    times = {kind: table(sample_s) for kind, sample_s in SAMPLE_S.items()}
    layers = tuple(
        LayerProfile(f"layer-{index}", size.parameter_bytes, size.output.size_bytes, size.output.size_bytes, times)
        for index, size in enumerate(sizes)
    )
    devices = tuple(Device(kind, kind, "lan", 2**30) for kind in SAMPLE_S)
    limits = BatchLimits(setting.first_batch, LARGEST_BATCH, "adascale")
    rule = Optimizer("momentum", setting.learning_rate)
    training = Training(setting.first_batch, optimizer=rule, seed=seed, batch=limits)
    cluster = Cluster(devices, (Link("lan", "lan", 10e9, 50e-6),))
    return Scenario("digits on cluster A", cluster, ModelProfile("digits-mlp", layers), training, MODEL)


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """One run of a system.

    Attributes:
        system: Name of the system, one of `POLICIES`.
        time_s: Time from the first action to the target, seconds; infinity if the run ended before.
        accuracy: Share of the held-out images that are classified correctly at the end of the run.
        largest_batch: Largest global batch up to the target, or to the end, samples.
    """

    setting: Setting
    system: str
    seed: int
    time_s: float
    accuracy: float
    largest_batch: int

    def row(self) -> Row:
        """Return the run as a row for tables."""
        return {
            "first_batch": self.setting.first_batch,
            "system": self.system,
            "seed": self.seed,
            "seconds_to_target": self.time_s if math.isfinite(self.time_s) else "not met",
            "accuracy": self.accuracy,
            "largest_batch": self.largest_batch,
        }


def train(setting: Setting, system: str, seed: int) -> TrainedRun:
    """Train with one of `POLICIES`, and return when the target was met."""
    scenario = digits_scenario(setting, seed)
    steps = setting.fixed_steps if POLICIES[system] in (None, LbBspPolicy) else setting.adaptive_steps
    with TemporaryDirectory() as folder:
        parameters = Path(folder) / "parameters.safetensors"
        backend = TorchBackend("real", parameters=parameters, on_this_device=True, at_profile_speed=True)
        policy = POLICIES[system]
        record = backend.run(scenario, adaptdl(scenario), None if policy is None else policy(scenario), steps)
        trained = load_file(parameters)
    model = build(**_ARGUMENTS)
    nn.Sequential(*model.layers).load_state_dict(trained)
    table = record.metrics
    samples, ends_s = table["samples"].tolist(), table["end_s"].tolist()
    met = first_step_at(record.losses, samples)
    time_s = math.inf if met is None else ends_s[met] - (ends_s[0] - table["step_s"].iloc[0])
    end_step = len(samples) if met is None else met + 1
    return TrainedRun(setting, system, seed, float(time_s), model.accuracy(model.layers), max(samples[:end_step]))


def first_step_at(losses: Sequence[float], samples: Sequence[int]) -> int | None:
    """Return the first step after which the mean loss of the last `WINDOW_SAMPLES` samples or more is at the target.

    Args:
        losses: Mean loss of the samples of each step.
        samples: Number of samples of each step.
    """
    counted = np.concatenate([[0], np.cumsum(samples)])
    summed = np.concatenate([[0.0], np.cumsum(np.multiply(losses, samples))])
    for end in range(1, len(counted)):
        begin = int(np.searchsorted(counted, counted[end] - WINDOW_SAMPLES, side="right")) - 1
        if begin >= 0 and (summed[end] - summed[begin]) / (counted[end] - counted[begin]) <= TARGET_LOSS:
            return end - 1
    return None


def ratio_interval(times_s: Sequence[float], rival_times_s: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean ratio of the first times to the others, and the ends of its 95 % confidence interval.

    The times at the same place belong to the same seed. The mean is geometric, and the interval that of Student's t
    distribution for the logarithms of the ratios.
    """
    logs = np.log(np.divide(times_s, rival_times_s))
    margin = float(stdtrit(len(logs) - 1, (1 + _CONFIDENCE) / 2) * logs.std(ddof=1) / math.sqrt(len(logs)))
    mean = float(logs.mean())
    return math.exp(mean), math.exp(mean - margin), math.exp(mean + margin)


def execute_training(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Train every system in all settings, and compare the times to the target; ``quick`` takes fewer seeds."""
    rows: list[Row] = []
    checks: list[Check] = []
    for setting in SETTINGS:
        runs: dict[str, list[TrainedRun]] = {system: [] for system in POLICIES}
        for seed in range(QUICK_SEEDS if quick else SEEDS):
            for system, done in runs.items():
                tell(f"trained for real: first batch {setting.first_batch}, {system}, seed {seed}")
                done.append(train(setting, system, seed))
        rows += [run.row() for done in runs.values() for run in done]
        more_rows, more_checks = _compared(setting, runs)
        rows += more_rows
        checks += more_checks
    error_percent = 100 * noise_error()
    rows.append({"system": "noise scale, shares 1:4", "error_percent": error_percent})
    checks.append(at_most("error of the noise scale, percent", abs(error_percent), _MOST_ERROR_PERCENT))
    return BenchResult(rows, checks)


def _compared(setting: Setting, runs: Mapping[str, Sequence[TrainedRun]]) -> tuple[list[Row], list[Check]]:
    """Return a row for each rival of Cannikin, and the checks that all runs met the target, Cannikin's sooner.

    LB-BSP is not checked: it is as quick where the batch has no reason to grow.
    """
    where = f"first batch {setting.first_batch}"
    missed = sum(math.isinf(run.time_s) for done in runs.values() for run in done)
    checks = [at_most(f"{where}: runs that do not meet the target", missed, 0)]
    rows: list[Row] = []
    for rival in [system for system in runs if system != "cannikin" and not missed]:
        own_s, rival_s = ([run.time_s for run in runs[name]] for name in ("cannikin", rival))
        mean, low, high = ratio_interval(own_s, rival_s)
        row: dict[str, str | float | int] = {
            "first_batch": setting.first_batch,
            "system": f"cannikin to {rival}",
            "runs": len(own_s),
            "ratio": mean,
            "low": low,
            "high": high,
            "saved_percent": 100 * (1 - mean),
        }
        if rival in CLAIMED:
            # A published saving appears if the whole interval has it.
            appears = "appears" if high <= 1 - CLAIMED[rival] else "does not appear"
            row |= {"claimed_percent": 100 * CLAIMED[rival], "claim": appears}
            checks.append(at_most(f"{where}: time to the target, cannikin to {rival}, upper end", high, 1.0))
        rows.append(row)
    return rows, checks


# Number of steps of which the noise scale is estimated, and the shares of the two devices.
_NOISE_STEPS, _NOISE_SHARES = 200, (1, 4)


def noise_error(steps: int = _NOISE_STEPS) -> float:
    """Return the relative error of the noise scale that two devices with shares 1:4 measure in a real run.

    The learning rate is so small that the parameters stay the same, for which the gradient of every sample is known.
    """
    setting = SETTINGS[-1]
    scenario = digits_scenario(setting, seed=0)
    still = replace(scenario.training, optimizer=Optimizer("sgd", learning_rate=1e-12))
    scenario = replace(scenario, training=still)
    devices = [device.name for device in scenario.cluster.devices][: len(_NOISE_SHARES)]
    plan = plan_of_samples(scenario, "by hand", devices, _NOISE_SHARES, (setting.first_batch,))
    record = TorchBackend("real", on_this_device=True).run(scenario, plan, None, steps)
    estimates = [norms.estimate(NOISE_ESTIMATOR) for norms in record.gradient_norms]
    found = fmean(each.variance for each in estimates) / fmean(each.squared_gradient for each in estimates)
    return found / _noise_of_all_samples(scenario) - 1


def _noise_of_all_samples(scenario: Scenario) -> float:
    """Return the noise scale from the gradient of each training sample, at the initial parameters."""
    torch.manual_seed(scenario.training.seed)
    model = build(**_ARGUMENTS)
    network = nn.Sequential(*model.layers)
    inputs, targets = model.select(torch.arange(model.size))
    gradients = []
    for index in range(model.size):
        loss = model.loss(network(inputs[index : index + 1]), targets[index : index + 1])
        gradients.append(torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(network.parameters()))]))
    each = torch.stack(gradients).double()
    mean = each.mean(dim=0)
    return float((each - mean).square().sum(dim=1).mean() / mean.square().sum())
