import numpy as np
import pytest

from experiments.benches.sailor.accuracy import (
    SIMULATED_SHARES,
    WORKSPACE_SHARES,
    Calibration,
    Evidence,
    fit,
)

TRUTH = Calibration(network_share=0.7, framework_bytes=5000, workspace_share=1.5)


def evidence(step_noise: float = 1.0, memory_noise: float = 1.0) -> Evidence:
    """Five runs that obey `TRUTH`, but for the last one, which the noise disturbs."""
    compute_s, transfer_s = np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([0.5, 0.1, 1.0, 0.3, 0.2])
    tensors, largest = np.array([1e4, 2e4, 3e4, 4e4, 5e4]), np.array([2e3, 1e3, 6e3, 3e3, 1e3])
    disturbance = np.array([1.0, 1.0, 1.0, 1.0, step_noise]), np.array([1.0, 1.0, 1.0, 1.0, memory_noise])
    return Evidence(
        (compute_s + transfer_s / TRUTH.network_share) * disturbance[0],
        compute_s[:, None] + transfer_s[:, None] / np.array(SIMULATED_SHARES),
        (tensors + TRUTH.workspace_share * largest + TRUTH.framework_bytes) * disturbance[1],
        tensors[:, None] + largest[:, None] * WORKSPACE_SHARES,
    )


def test_constants_are_found_again() -> None:
    assert fit(evidence(), range(5)) == Calibration(
        pytest.approx(TRUTH.network_share), TRUTH.framework_bytes, pytest.approx(TRUTH.workspace_share)
    )


def test_one_disturbed_run_does_not_bend_them() -> None:
    disturbed = fit(evidence(step_noise=1.3, memory_noise=0.8), range(5))
    assert disturbed.network_share == pytest.approx(TRUTH.network_share)
    assert disturbed.framework_bytes == TRUTH.framework_bytes


def test_only_the_chosen_runs_count() -> None:
    assert fit(evidence(step_noise=3.0), range(4)).network_share == pytest.approx(TRUTH.network_share)
