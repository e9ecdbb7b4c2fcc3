from pathlib import Path

import numpy as np
import pytest

from experiments.benches.planning.adaptation import checks, measure_pair, wide_area_links, with_traces
from experiments.benches.planning.adaptation_traces import TracePair, trace_pairs
from experiments.runs.scenario import choose_scenario
from traces.generators.presets import PRESETS
from traces.trace import LinkTrace

NOMINAL_BPS = (400e6, 400e6)


def test_every_preset_plays_scaled_where_its_own_scale_does_not_fit() -> None:
    pairs = list(trace_pairs(None, NOMINAL_BPS))
    assert [pair.name for pair in pairs] == [f"preset {name}" for name in PRESETS]
    for pair in pairs:
        means_bps = [trace.mean_bps for trace in pair.traces]
        assert pair.traces[0] != pair.traces[1]
        if pair.scaled:
            assert means_bps == pytest.approx(NOMINAL_BPS)
        else:
            assert 1 / 4 <= sum(means_bps) / sum(NOMINAL_BPS) <= 4


def test_recorded_sets_are_played(shared_folder: Path) -> None:
    pairs = list(trace_pairs(shared_folder / "traces", NOMINAL_BPS))
    sets = [pair.name.split()[0] for pair in pairs]
    assert set(sets) == {"preset", "wanify", "fcc", "netlatency"}
    latencies = [pair.traces[0].latency_s for pair in pairs if pair.name.startswith("netlatency")]
    assert all(series is not None and np.all(series >= 0) for series in latencies)


def test_traces_go_on_both_directions_of_the_links_between_regions() -> None:
    scenario = choose_scenario("cloud-edge-end")
    assert [link.name for link in wide_area_links(scenario)] == ["cloud->edge", "edge->end"]
    traces = [LinkTrace([0.0], [rate_bps], 60.0) for rate_bps in (1e8, 2e8)]
    played = {link.name: link.trace for link in with_traces(scenario, traces).cluster.links}
    assert (played["cloud->edge"], played["edge->cloud"]) == (traces[0], traces[0])
    assert (played["edge->end"], played["end->edge"]) == (traces[1], traces[1])
    assert played["end->end"] is None


@pytest.mark.slow
def test_a_row_holds_what_was_run() -> None:
    steady = LinkTrace([0.0], [4e8], 60.0)
    row = measure_pair(TracePair("steady", (steady, steady), scaled=False), 60.0)
    assert (row["trace"], row["scaled"]) == ("steady", "no")
    assert float(row["auto_gain"]) >= 0.98
    assert float(row["best_static_per_s"]) >= float(row["none_per_s"])
    assert [check.holds for check in checks([row])] == [False, True]
