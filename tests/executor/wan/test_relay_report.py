"""What a relay leaves for the launcher, what of it is worth saying, and which links are too fast for it."""

from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from executor.validate import too_fast
from executor.wan.emulated_link import LinkCount
from executor.wan.relay import Lateness, RelayReport, read_report
from planner.scenario.cluster import Cluster, Link
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.trace import LinkTrace

FINE = RelayReport({"tcp_congestion_control": "cubic"}, (), (LinkCount("a->b", 90, 0),), 0, 0, 0.001, 0.02)


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = replace(FINE, tcp_misses=("tcp_wmem is 1, not 2",))
    report.write(tmp_path / "relay.json")
    assert read_report(tmp_path / "relay.json") == report


def test_what_is_as_it_should_be_needs_no_word() -> None:
    assert FINE.remarks() == []


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (replace(FINE, late_s=0.007, latest_s=0.031), "7 ms late or more one time in a hundred, 31 ms at most"),
        (replace(FINE, links=(LinkCount("a->b", 90, 10),)), "queue was full: a->b (10 of 100)"),
        (replace(FINE, refused_packets=3), "3 packets were refused"),
        (replace(FINE, unread_packets=7), "hosts dropped 7 packets before they came to a link"),
        (replace(FINE, tcp_misses=("tcp_wmem is 1, not 2 (why)",)), "not set as asked for: tcp_wmem is 1, not 2 (why)"),
    ],
)
def test_what_is_not_is_said_in_a_sentence(report: RelayReport, words: str) -> None:
    (remark,) = report.remarks()
    assert words in remark


def test_the_latest_hundredth() -> None:
    late = Lateness()
    assert (late.exceeded_s(0.01), late.largest_s) == (0.0, 0.0)
    for _ in range(98):
        late.note(0.0001)
    late.note(0.0125)
    late.note(3.0)
    assert (late.exceeded_s(0.01), late.exceeded_s(0.5), late.largest_s) == (0.012, 0.0, 3.0)
    late.note(3.0)
    assert late.exceeded_s(0.01) == 1.0


def test_links_that_are_faster_than_the_relay() -> None:
    scenario = chain_scenario([1e-3] * 2, [1e-3] * 2, bandwidth_bps=800e6)
    plan = chain_plan(scenario)
    assert too_fast(plan, scenario, "paced") is None
    swaying = LinkTrace(np.array([0.0, 1.0]), np.array([100e6, 2e9]), 2.0)
    there, back = scenario.cluster.links
    links = (replace(there, trace=swaying), replace(back, bandwidth_bps=inf))
    said = too_fast(plan, replace(scenario, cluster=Cluster(scenario.cluster.devices, links)), "paced")
    assert said is not None
    assert "about 1000 Mbit/s" in said
    assert "region-0->region-1 (2000 Mbit/s), region-1->region-0 (unlimited) can be slower" in said


def test_paced_runs_send_nothing_over_a_link_of_two_devices_of_a_host() -> None:
    scenario = chain_scenario([1e-3] * 2, [1e-3] * 2)
    plan = chain_plan(scenario)
    devices = tuple(replace(device, region="here", host="box") for device in scenario.cluster.devices)
    names = [device.name for device in devices]
    direct = (Link(*names, 2e9, 0.0), Link(*names[::-1], 2e9, 0.0))
    for links, compute, sent in (
        (direct, "paced", []),
        (direct, "real", ["device-0->device-1", "device-1->device-0"]),
        ((Link("box", "box", 2e9, 0.0),), "paced", ["box->box"]),
        ((replace(direct[0], loss=0.1), direct[1]), "paced", ["device-0->device-1"]),
    ):
        said = too_fast(plan, replace(scenario, cluster=Cluster(devices, links)), compute)
        assert [
            name for name in ("device-0->device-1", "device-1->device-0", "box->box") if name in (said or "")
        ] == sent
