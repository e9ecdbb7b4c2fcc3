from pathlib import Path

import numpy as np
import pytest

from experiments.report.figures.links import plot_rates
from traces.statistics import TraceStatistics, describe, sparkline
from traces.trace import LinkTrace


def test_every_rate_counts_for_as_long_as_it_holds() -> None:
    trace = LinkTrace(np.array([0.0, 50.0, 95.0, 99.0]), np.array([4.0, 2.0, 8.0, 0.0]), 100.0)
    mean = 3.22
    square = (50 * 16 + 45 * 4 + 4 * 64) / 100
    assert describe(trace) == TraceStatistics(
        duration_s=100.0,
        mean_bps=pytest.approx(mean),
        minimum_bps=0.0,
        p5_bps=2.0,
        median_bps=4.0,
        p95_bps=4.0,
        maximum_bps=8.0,
        coefficient_of_variation=pytest.approx(np.sqrt(square - mean**2) / mean),
        zero_share=pytest.approx(0.01),
        pieces=4,
    )


def test_a_dead_link_has_no_variation() -> None:
    found = describe(LinkTrace(np.zeros(1), np.zeros(1), 5.0))
    assert (found.mean_bps, found.coefficient_of_variation, found.zero_share) == (0, 0, 1)


def test_sparkline() -> None:
    trace = LinkTrace(np.arange(5.0), np.array([8.0, 4.0, 0.0, 0.1, 1.0]), 5.0)
    assert sparkline(trace, width=5) == "█▄ ▁▁"
    assert sparkline(LinkTrace(np.zeros(1), np.zeros(1), 5.0), width=3) == "   "


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    trace = LinkTrace(np.arange(3.0), np.array([8e6, 0.0, 4e6]), 5.0)
    plot_rates({f"link {number}": trace for number in range(9)}, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
