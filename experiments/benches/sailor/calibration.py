"""The constants of a simulated step that no profile and no datasheet gives: three, each with a physical meaning.

Everything else is measured or counted: layer times, activation and parameter bytes, message rates, update times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.scenario.effects import ComputeEffects, Effects, MemoryEffects, NetworkEffects


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of training on GPUs with one stream for compute and communication.

    The defaults are the least mean absolute relative error on half of eth-easl/sailor's 15 measured runs of OPT-350M
    on GH200 nodes of 4 GPUs (DeepSpeed's pipeline engine, fp32, Adam); `ropebridge bench accuracy` fits them anew and
    holds them to the other half.

    Attributes:
        network_share: Share of the rate that a benchmark of an idle network measured between two nodes which training
            gets, in transfers between stages and in sums of gradients: four GPUs of a node send at once, next to other
            jobs, in ranks that are never quite in step.
        framework_bytes: Memory of a GPU that belongs to no tensor of training: the CUDA context, the buffers of
            NCCL's communicators (3 to 4 GB together, as another framework reported on the same machines), the
            allocator's reserve.
        workspace_share: What the backward of one layer holds while it runs, relative to what the layer keeps for it:
            a gradient for each kept activation, and temporaries of softmax, dropout and loss of the same size.
    """

    network_share: float = 0.77
    framework_bytes: int = 4_460_000_000
    workspace_share: float = 2.3

    @property
    def memory(self) -> MemoryEffects:
        """The constants of memory as effects."""
        return MemoryEffects(self.framework_bytes, self.workspace_share)

    def effects(self) -> Effects:
        """Return the constants as effects of a scenario."""
        network, compute = NetworkEffects(share=self.network_share), ComputeEffects(transfers_block=True)
        return Effects(network, compute, self.memory)


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Where constants are sought.
SHARES = np.linspace(0.3, 1.0, 141).round(3)
WORKSPACE_SHARES = np.linspace(0.0, 5.0, 51).round(1)

# Shares that are simulated; in between step times are nearly linear in 1/share, as the time of a transfer is.
SIMULATED_SHARES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3)


@dataclass(frozen=True, eq=False, slots=True)
class Evidence:
    """What was measured, and what the model says for each value of a constant.

    Attributes:
        measured_s: Of a step, [runs].
        simulated_s: Of a step at each of `SIMULATED_SHARES`, [runs, shares].
        measured_bytes: Of the fullest device, [runs].
        tensors_bytes: Of the fullest device for each of `WORKSPACE_SHARES`, without the framework, [runs, workspaces].
    """

    measured_s: Floats
    simulated_s: Floats
    measured_bytes: Floats
    tensors_bytes: Floats

    @property
    def runs(self) -> int:
        """How many."""
        return len(self.measured_s)

    def step_errors(self, calibration: Calibration) -> Floats:
        """Return simulated over measured step time, less 1, [runs]."""
        return _step_errors(self, np.array([calibration.network_share]))[:, 0]

    def memory_errors(self, calibration: Calibration) -> Floats:
        """Return modelled over measured memory, less 1, [runs]."""
        at_share = [np.interp(calibration.workspace_share, WORKSPACE_SHARES, row) for row in self.tensors_bytes]
        return (np.array(at_share) + calibration.framework_bytes) / self.measured_bytes - 1


def fit(evidence: Evidence, runs: Sequence[int] | Ints) -> Calibration:
    """Return the constants with the least mean absolute relative error on some of the runs."""
    chosen = np.asarray(runs)
    share = SHARES[np.abs(_step_errors(evidence, SHARES)[chosen]).mean(axis=0).argmin()]
    measured, tensors = evidence.measured_bytes[chosen], evidence.tensors_bytes[chosen]
    frameworks = [_weighted_median(measured - column, 1 / measured) for column in tensors.T]
    errors = np.abs((tensors + frameworks) / measured[:, None] - 1).mean(axis=0)
    best = int(errors.argmin())
    return Calibration(float(share), round(max(0.0, frameworks[best])), float(WORKSPACE_SHARES[best]))


def _step_errors(evidence: Evidence, shares: Floats) -> Floats:
    """Errors of the step time, [runs, shares]."""
    known = 1 / np.array(SIMULATED_SHARES)
    times_s = np.array([np.interp(1 / shares, known, row) for row in evidence.simulated_s])
    return times_s / evidence.measured_s[:, None] - 1


def _weighted_median(values: Floats, weights: Floats) -> float:
    """Return the value c for which the sum of weights · |values - c| is least."""
    order = values.argsort()
    cumulated = weights[order].cumsum()
    return float(values[order][np.searchsorted(cumulated, cumulated[-1] / 2)])
