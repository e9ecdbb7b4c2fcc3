"""Compares simulated step times and peak memory with those of measured runs.

The constants of `Calibration` are shipped: they were fitted to half of one model's runs. On request they are
fitted anew to the runs of all sizes of cluster but one, and judged on those of that size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from experiments.benches.result import BenchResult, Check, Row, at_most
from experiments.benches.sailor.measured_files import MeasuredFiles, SailorNetwork, find_measured_files
from experiments.benches.sailor.runs import MeasuredRun, read_sailor_runs
from planner.files.importers.sailor import read_sailor
from planner.runs.metrics import measure
from planner.scenario.effects import ComputeEffects, Effects, MemoryEffects, NetworkEffects
from planner.step.memory import peak_bytes
from sim.simulator import Simulator
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted constants of training on GPUs with one stream for compute and communication.

    The defaults have the least mean absolute relative error on half of eth-easl/sailor's 15 measured runs of OPT-350M
    on GH200 nodes of 4 GPUs (DeepSpeed's pipeline engine, fp32, Adam). `ropebridge bench accuracy` judges
    them on measured runs, and with `--refit` fits them anew.

    Attributes:
        network_share: Rate of activations and all-reduces between two nodes, as a share of the rate that a benchmark
            measured on the idle network. In training the four GPUs of a node share the network with other jobs.
        framework_bytes: Memory of a GPU that holds no tensor of training: the CUDA context and the buffers of NCCL (3
            to 4 GB together, as another framework reported on the same machines), and the allocator's reserve.
        workspace_share: Memory that the backward of a layer takes while it runs, relative to the layer's saved
            activations: their gradients, and temporaries of softmax, dropout and loss of the same size.
    """

    network_share: float = 0.77
    framework_bytes: int = 4_460_000_000
    workspace_share: float = 2.3

    @property
    def memory(self) -> MemoryEffects:
        """Return the constants of memory as effects of a scenario."""
        return MemoryEffects(self.framework_bytes, self.workspace_share)

    def effects(self) -> Effects:
        """Return all constants as effects of a scenario."""
        network, compute = NetworkEffects(share=self.network_share), ComputeEffects(transfers_block=True)
        return Effects(network, compute, self.memory)


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The values that `fit` tries.
SHARES = np.linspace(0.3, 1.0, 141).round(3)
WORKSPACE_SHARES = np.linspace(0.0, 5.0, 51).round(1)

# Network shares that are simulated. Step times are interpolated in 1/share, which transfer times are proportional to.
SIMULATED_SHARES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3)


@dataclass(frozen=True, eq=False, slots=True)
class Evidence:
    """Measured step times and memory of the runs, and the simulator's for several values of the constants.

    Attributes:
        measured_s: Measured step time, seconds, shape (runs,).
        simulated_s: Simulated step time at each of `SIMULATED_SHARES`, seconds, shape (runs, shares).
        measured_bytes: Measured memory of the fullest device, shape (runs,).
        tensors_bytes: Computed memory of the fullest device at each of `WORKSPACE_SHARES`, without the framework's
            bytes, shape (runs, workspace shares).
    """

    measured_s: Floats
    simulated_s: Floats
    measured_bytes: Floats
    tensors_bytes: Floats


def fit(evidence: Evidence, runs: Sequence[int] | Ints) -> Calibration:
    """Return the constants with the least mean absolute relative error on the given runs."""
    chosen = np.asarray(runs)
    share = SHARES[np.abs(_step_errors(evidence, SHARES)[chosen]).mean(axis=0).argmin()]
    measured, tensors = evidence.measured_bytes[chosen], evidence.tensors_bytes[chosen]
    frameworks = [_weighted_median(measured - column, 1 / measured) for column in tensors.T]
    errors = np.abs((tensors + frameworks) / measured[:, None] - 1).mean(axis=0)
    best = int(errors.argmin())
    return Calibration(float(share), round(max(0.0, frameworks[best])), float(WORKSPACE_SHARES[best]))


def _step_errors(evidence: Evidence, shares: Floats) -> Floats:
    """Return the relative error of the simulated step time for each network share, shape (runs, shares)."""
    known = 1 / np.array(SIMULATED_SHARES)
    times_s = np.array([np.interp(1 / shares, known, row) for row in evidence.simulated_s])
    return times_s / evidence.measured_s[:, None] - 1


def _weighted_median(values: Floats, weights: Floats) -> float:
    """Return the weighted median: the value c with the least sum of ``weights * abs(values - c)``."""
    order = values.argsort()
    cumulated = weights[order].cumsum()
    return float(values[order][np.searchsorted(cumulated, cumulated[-1] / 2)])


# Bars: mean absolute relative errors, with the shipped constants and with constants fitted to other sizes of cluster.
WORST_STEP_ERROR = 0.05
WORST_FITTED_STEP_ERROR = 0.06
WORST_MEMORY_ERROR = 0.06
MOST_CONSTANTS = 3

# Two steps suffice: the update at the end of a step empties the pipeline, so that all further steps are equal.
STEPS = 2


def measure_accuracy(
    quick: bool, tell: Callable[[str], None], files: MeasuredFiles | None = None, *, refit: bool = False
) -> BenchResult:
    """Simulate every measured run with the shipped constants, and compare; ``quick`` changes nothing.

    With ``refit``, the constants are also fitted to the runs of all cluster sizes but one, for each size in turn, and
    judged on the runs of that size: this shows how they transfer to clusters that they were not fitted to.

    Raises:
        InputError: No option or variable names the measured files, a file is malformed, or all runs that constants are
            to be fitted to have the same number of devices.
    """
    found = files or find_measured_files()
    model = read_sailor(found.times, found.sizes, found.model_name)
    runs = read_sailor_runs(found.runs, model, SailorNetwork(found.network))
    rows = [_row(run, "shipped", Calibration()) for run in runs]
    checks = [
        *_checks("the shipped constants", rows, WORST_STEP_ERROR),
        at_most("calibrated constants", len(fields(Calibration)), MOST_CONSTANTS),
    ]
    if refit:
        fitted = _other_sizes(runs, str(found.runs), tell)
        rows += fitted
        checks += _checks("constants fitted to other sizes of cluster", fitted, WORST_FITTED_STEP_ERROR)
    return BenchResult(rows, checks)


def _other_sizes(runs: Sequence[MeasuredRun], where: str, tell: Callable[[str], None]) -> list[Row]:
    """Return a row for each run, with the constants that fit the runs on other numbers of devices best."""
    sizes = np.array([len(run.plan.devices) for run in runs])
    if len(set(sizes.tolist())) < 2:
        raise InputError(
            "all runs are on clusters of one size", where=where, valid="leave --refit out, or give runs of two sizes"
        )
    evidence = _evidence(runs, tell)
    calibrations = {size: fit(evidence, np.flatnonzero(sizes != size)) for size in sorted(set(sizes.tolist()))}
    return [
        _row(run, f"not {size} devices", calibrations[size]) for run, size in zip(runs, sizes.tolist(), strict=True)
    ]


def _evidence(runs: Sequence[MeasuredRun], tell: Callable[[str], None]) -> Evidence:
    simulated_s = []
    for run in runs:
        tell(f"{run.name}, {len(SIMULATED_SHARES)} shares of the network")
        simulated_s.append([_step_s(run, replace(Calibration(), network_share=share)) for share in SIMULATED_SHARES])
    tensors_bytes = [[_peak_bytes(run, MemoryEffects(0, share)) for share in WORKSPACE_SHARES.tolist()] for run in runs]
    return Evidence(
        np.array([run.step_s for run in runs]),
        np.array(simulated_s),
        np.array([float(run.peak_bytes) for run in runs]),
        np.array(tensors_bytes, np.float64),
    )


def _step_s(run: MeasuredRun, calibration: Calibration) -> float:
    scenario = replace(run.scenario, effects=calibration.effects())
    return measure(Simulator().run(scenario, run.plan, None, STEPS)).step_s


def _peak_bytes(run: MeasuredRun, effects: MemoryEffects) -> int:
    return max(peak_bytes(run.plan, run.scenario, effects).values())


def _row(run: MeasuredRun, fitted_to: str, calibration: Calibration) -> Row:
    step_s, peak = _step_s(run, calibration), _peak_bytes(run, calibration.memory)
    return {
        "run": run.name,
        "constants": fitted_to,
        "measured_s": run.step_s,
        "simulated_s": step_s,
        "step_error": step_s / run.step_s - 1,
        "measured_bytes": run.peak_bytes,
        "simulated_bytes": peak,
        "memory_error": peak / run.peak_bytes - 1,
        **{field.name: getattr(calibration, field.name) for field in fields(calibration)},
    }


def _checks(constants: str, rows: Sequence[Row], worst_step_error: float) -> list[Check]:
    def mean_error(name: str) -> float:
        return float(np.mean([abs(float(row[name])) for row in rows]))

    return [
        at_most(f"mean absolute error of step time, {constants}", mean_error("step_error"), worst_step_error),
        at_most(f"mean absolute error of memory, {constants}", mean_error("memory_error"), WORST_MEMORY_ERROR),
    ]
