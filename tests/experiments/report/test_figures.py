import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path

import matplotlib.collections
import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.report.data.gantt_rows import choose_steps, gantt_rows
from experiments.report.data.labels import run_names
from experiments.report.data.link_rates import busiest, capacity_bps, departing, mean_use, used_bps, wan_traffic
from experiments.report.data.run_view import run_views
from experiments.report.figures.gantt import draw_gantt
from experiments.report.figures.run_figure import draw_runs
from planner.events.event import PROBE_ACTION, Event, EventKind
from planner.events.log import as_log
from planner.runs.record import RunRecord
from sim.simulator import Simulator
from tests.helpers.processes.page_runs import simulated, slower
from tests.helpers.scenarios.builders import chain_plan, chain_scenario


def steady(devices: int, **options: float) -> RunRecord:
    scenario = chain_scenario([0.002] * devices, [0.004] * devices, **options)  # type: ignore[arg-type]
    return Simulator().run(scenario, chain_plan(scenario), None, 5)


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_two_runs_become_one_picture(tmp_path: Path) -> None:
    path = tmp_path / "runs.png"
    draw_runs([simulated(), slower(simulated())], path)
    width, height = png_size(path)
    assert width == 1500
    assert 1000 < height < 1600
    assert path.stat().st_size > 50_000
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("devices", [1, 2, 40])
def test_runs_without_links_decisions_or_room_for_numbers_are_drawn(devices: int, tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    draw_runs([steady(devices, latency_s=0.01)], path)
    assert png_size(path)[0] == 1500


def test_names_are_no_formulas(tmp_path: Path) -> None:
    record = steady(2)
    scenario = record.scenario
    odd = type(scenario)("a $\\frac$ b_c", scenario.cluster, scenario.model, scenario.training)
    draw_runs([replace(record, scenario=odd)], tmp_path / "run.png")


def test_every_compute_of_the_window_has_a_bar_in_its_devices_row() -> None:
    record = simulated()
    steps = (1, 3)
    (run,) = run_views([record])
    rows = gantt_rows(run, steps)
    axes = Figure().add_subplot()
    draw_gantt(axes, rows, rows.span_s)
    bars: Counter[str] = Counter()
    names = list(rows.devices)
    for collection in axes.collections:
        assert isinstance(collection, matplotlib.collections.PolyCollection)
        if collection.get_label() != "waiting":
            corners = [np.asarray(path.vertices) for path in collection.get_paths()]
            bars.update(names[round(float(corner[:4, 1].mean()))] for corner in corners)
    computes = [e for e in record.events if e.kind is EventKind.COMPUTE and steps[0] <= e.step < steps[1]]
    assert bars == Counter(event.device for event in computes)
    assert list(rows.devices.values()) == ["device-0 (stage 0, region-0)", "device-1 (stage 1, region-1)"]
    assert rows.step_labels == ("step 1", "step 2, decision 1")
    assert rows.starts_s[0] == 0


def test_the_window_shows_the_first_change_or_else_the_middle() -> None:
    change = simulated().decisions[0].first_step
    assert choose_steps(run_views([simulated(), slower(simulated())])) == (change - 1, change + 1)
    assert choose_steps(run_views([replace(simulated(), decisions=())])) == (11, 12)
    assert choose_steps(run_views([steady(2)])) == (1, 4)


def test_nothing_is_written_when_drawing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no pixels")

    path = tmp_path / "runs.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", broken)
    with pytest.raises(RuntimeError, match="no pixels"):
        draw_runs([simulated()], path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def send(start_s: float, end_s: float, size_bytes: int = 1000) -> Event:
    return Event(EventKind.SEND, "device-0", "device-1", 0, 0, 0, 0, "F", start_s, end_s, size_bytes)


def test_messages_that_wait_for_their_turn_do_not_count_as_leaving() -> None:
    events = [send(0, 1), send(0, 3), send(5, 6)]
    assert departing(as_log(events))[1].tolist() == [0, 1, 5]


def test_used_rates_add_up_to_the_bytes_sent_and_stay_below_capacity() -> None:
    record = simulated()
    traffic = wan_traffic(record)
    links = {link.name: link for link in record.scenario.cluster.links}
    sent: Counter[str] = Counter()
    for event in record.events:
        if event.kind is EventKind.SEND and event.action != PROBE_ACTION:
            sent[f"{event.device}->{event.peer}".replace("device", "region")] += 8 * event.size_bytes
    assert set(traffic) == set(sent)
    for name, messages in traffic.items():
        edges_s = np.linspace(0, 30, 61)
        rate_bps = used_bps(messages, edges_s)
        assert (rate_bps * np.diff(edges_s)).sum() == pytest.approx(sent[name])
        capacity = links[name].trace.bits_between(edges_s[:-1], edges_s[1:]) / np.diff(edges_s)  # type: ignore[union-attr]
        assert (rate_bps <= 1.01 * capacity).all()
        assert 0 < mean_use(links[name], messages, 20.0) < 1


def test_capacity_follows_the_trace_around_its_loop() -> None:
    link = simulated().scenario.cluster.links[0]
    edges_s, rate_bps = capacity_bps(link, 40.0)
    assert edges_s.tolist() == [0, 7, 17, 27, 34, 40]
    assert rate_bps == pytest.approx([120e6, 40e6, 120e6, 120e6, 40e6])
    steady_edges_s, steady_bps = capacity_bps(replace(link, trace=None), 40.0)
    assert (steady_edges_s.tolist(), steady_bps.tolist()) == ([0, 40], [link.bandwidth_bps])


def test_both_directions_of_the_busiest_pairs_are_shown() -> None:
    record = steady(4)
    links = busiest(record.scenario.cluster.links, [wan_traffic(record)], 2)
    assert [link.name for link in links] == [
        "region-0->region-1",
        "region-1->region-0",
        "region-1->region-2",
        "region-2->region-1",
    ]


def test_runs_are_told_apart_by_backend_then_strategy_then_number() -> None:
    one = simulated()
    other = replace(one, plan=replace(one.plan, strategy="other"))
    assert run_names([one, slower(one)]) == ("simulated", "paced")
    assert run_names([one, other]) == ("simulated hand", "simulated other")
    assert run_names([one, one]) == ("simulated 1", "simulated 2")
