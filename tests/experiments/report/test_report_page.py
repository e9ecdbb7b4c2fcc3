"""The page of runs, and everything else that `ropebridge report` writes, without a browser."""

import json
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.report.data.bars import ABSENT, BACKWARD, COMPUTES, FORWARD, WAIT, WAN_SEND, Bars, bars_of, busy_share
from experiments.report.data.decisions import reasons
from experiments.report.data.link_rates import departing
from experiments.report.data.run_view import run_views
from experiments.report.figures.run_figure import draw_runs
from experiments.report.html.gantt import packed
from experiments.report.html.memory import most_held_bytes
from experiments.report.html.run_page import write_run_page
from experiments.report.html.tables import decision_rows, run_rows, verdict
from experiments.runs.folder import write_record
from experiments.verbs.report import names_of
from planner.adapt.observation import Observer
from planner.events.event import PROBE_ACTION, EventKind
from planner.events.log import as_log
from planner.runs.memory_timeline import MemoryTimeline
from planner.runs.record import RunRecord
from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.page_runs import STEPS, gone_on, on_devices, simulated, slower, with_faults

DEVICES = {"device-0": "first", "device-1": "second"}


def test_every_event_but_decisions_and_outages_has_a_bar_with_its_times() -> None:
    record = with_faults(simulated())
    bars = bars_of(record, DEVICES)
    kinds = {"F": FORWARD, "B": BACKWARD}
    wanted: Counter[tuple[object, ...]] = Counter()
    log = as_log(record.events)
    rows, starts_s = departing(log)
    sends = zip(log.take(rows), starts_s, strict=True)
    sent_from = {(event.device, event.peer, event.arrived_s): start_s for event, start_s in sends}
    for event in record.events:
        end_s = event.end_s
        if event.action == PROBE_ACTION:
            continue
        if event.kind is EventKind.COMPUTE:
            kind, start_s = kinds[event.action], event.start_s
        elif event.kind is EventKind.SEND:
            end_s = event.arrived_s
            kind, start_s = WAN_SEND, sent_from[event.device, event.peer, end_s]
        elif event.kind is EventKind.RECEIVE:
            kind, start_s = WAIT, event.start_s
        elif event.kind is EventKind.FAULT and event.action == "absent":
            kind, start_s = ABSENT, event.start_s
        else:
            continue
        peer = event.peer if event.peer in DEVICES else ""
        wanted[kind, event.device, start_s, end_s, event.step, event.microbatch, peer, event.size_bytes] += 1
    assert Counter(rows_of(bars)) == wanted
    assert (np.diff(bars.start_s) >= 0).all()


def rows_of(bars: Bars) -> list[tuple[object, ...]]:
    names = list(DEVICES)
    return [
        (kind, names[row], start_s, end_s, step, microbatch, bars.peers[peer], bars.sizes_bytes[size])
        for kind, row, start_s, end_s, step, microbatch, peer, size in zip(
            bars.kind.tolist(),
            bars.row.tolist(),
            bars.start_s.tolist(),
            bars.end_s.tolist(),
            bars.step.tolist(),
            bars.microbatch.tolist(),
            bars.peer.tolist(),
            bars.size.tolist(),
            strict=True,
        )
    ]


def test_columns_in_the_page_are_small_and_say_the_same() -> None:
    bars = bars_of(with_faults(simulated()), DEVICES)
    columns = packed(bars)
    assert sum(column.dtype.itemsize for column in columns.values()) <= 24
    for name in ("kind", "row", "step", "stage", "microbatch", "peer", "action", "size", "start_s"):
        assert (columns[name] == getattr(bars, name)).all(), name
    # To a billionth of a second for bars of up to ten milliseconds.
    assert columns["start_s"] + columns["duration_s"] == pytest.approx(bars.end_s, rel=1e-7, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 9)), max_size=30), st.integers(1, 12))
def test_busy_shares_are_the_seconds_in_each_piece(work: list[tuple[int, int, int]], pieces: int) -> None:
    free, intervals = [0, 0, 0], []
    for row, gap, length in work:
        start = free[row] + gap
        intervals.append((row, start, start + length))
        free[row] = start + length
    end = max([1, *free])
    intervals.sort(key=lambda interval: interval[1])
    column = np.array(intervals, np.float64).reshape(-1, 3)
    blank = np.zeros(len(intervals), np.int64)
    bars = Bars(
        kind=np.full(len(intervals), FORWARD, np.uint8),
        row=column[:, 0].astype(np.uint16),
        start_s=column[:, 1],
        end_s=column[:, 2],
        step=blank.astype(np.int32),
        stage=blank.astype(np.int16),
        microbatch=blank.astype(np.int32),
        peer=blank.astype(np.uint16),
        action=blank.astype(np.uint8),
        size=blank,
        peers=("",),
        actions=("F",),
        sizes_bytes=(0,),
    )
    edges_s = np.linspace(0, end, pieces + 1)
    share = busy_share(bars, 3, edges_s)
    for piece, (left, right) in enumerate(pairwise(edges_s)):
        for row in range(3):
            inside = sum(max(0, min(e, right) - max(s, left)) for r, s, e in intervals if r == row)
            assert share[row, piece] == pytest.approx(inside / (right - left), abs=1e-9)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=20),
    st.integers(1, 15),
)
def test_no_peak_of_memory_is_lost(changes: list[tuple[int, int]], pieces: int) -> None:
    by_time = dict(changes)
    times = [0, *sorted(by_time)]
    held = [5, *(by_time[time] for time in sorted(by_time))]
    timeline = MemoryTimeline(np.array(times, np.float64), np.array(held, np.float64))
    edges_s = np.linspace(0, 50, pieces + 1)
    most = most_held_bytes(timeline, edges_s)
    for piece, (left, right) in enumerate(pairwise(edges_s)):
        at_left = max(time for time in times if time <= left)
        moments = {at_left} | {time for time in times if left <= time < right}
        assert most[piece] == max(held[times.index(time)] for time in moments)


def test_a_reason_names_the_link_that_changed_and_both_rates() -> None:
    record = simulated()
    for decision, reason in zip(record.decisions, reasons(record), strict=True):
        assert "nothing new" in reason or "region-0 → region-1" in reason or "region-1 → region-0" in reason
        assert "carried" in reason or "nothing new" in reason
        assert decision.observed_step < decision.first_step
    # What it says is what was observed.
    drop = next(number for number, each in enumerate(record.decisions) if 7 < seen_s(record, each.observed_step) < 17)
    step = record.decisions[drop].observed_step
    plan = record.decisions[drop - 1].plan if drop else record.plan
    observer = Observer()
    seen = [observer.observe(record.events, each, plan) for each in range(step + 1)]
    rates = {(path.source, path.target): path.rate_bps for path in seen[-1].paths}
    assert f"{rates['device-0', 'device-1'] / 1e6:.3g} Mbit/s" in reasons(record)[drop]


def seen_s(record: RunRecord, step: int) -> float:
    return max(event.end_s for event in record.events if event.step == step and event.kind is EventKind.COMPUTE)


def test_a_departure_is_a_reason() -> None:
    record = with_faults(simulated())
    plan = record.decisions[0].plan
    alone = replace(plan, pipelines=(replace(plan.pipelines[0], stages=plan.pipelines[0].stages[:1]),))
    answer = replace(record.decisions[0], observed_step=3, first_step=3, plan=alone)
    assert reasons(replace(record, decisions=(answer,))) == ("device-1 had gone",)


def test_tables_hold_simulated_and_real_beside_each_other() -> None:
    runs = run_views([simulated(), slower(simulated())], ["model", "real"])
    first, second = run_rows(runs)
    assert (first.cells[0], second.cells[0]) == ("model", "real")
    assert "1.040" in second.cells
    assert verdict(runs).startswith("Over 24 steps the simulated step is 3.8% shorter than")
    assert verdict(runs[:1]) == ""
    rows = decision_rows(runs)
    assert len(rows) == 2 * len(simulated().decisions)
    assert rows[0].step == simulated().decisions[0].first_step


class Links(HTMLParser):
    """What a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href")]


def test_a_page_loads_nothing_and_shows_names_as_they_are(tmp_path: Path) -> None:
    record = simulated()
    odd = replace(record, scenario=replace(record.scenario, name="</script><img src=x> & {{ b }}"))
    write_run_page([odd], ["<script>one</script>"], tmp_path / "page.html")
    page = Links()
    page.feed((tmp_path / "page.html").read_text())
    assert page.loaded == ["data:,"]
    assert page.tags["img"] == 0
    assert page.tags["h1"] == 1
    assert page.tags["section"] >= 6
    assert list(tmp_path.iterdir()) == [tmp_path / "page.html"]


@pytest.mark.parametrize(
    "make_records",
    [
        lambda: [on_devices(1)],
        lambda: [on_devices(40)],
        lambda: [gone_on(simulated(), 100)],
        lambda: [simulated(), gone_on(simulated(), 10)],
        lambda: [simulated(), gone_on(simulated(), STEPS)],
        lambda: [with_faults(simulated())],
    ],
    ids=["one device", "forty devices", "resumed", "overlapping", "one after the other", "faults"],
)
def test_odd_runs_have_a_page(make_records: Callable[[], list[RunRecord]], tmp_path: Path) -> None:
    records = make_records()
    write_run_page(records, [f"run {number}" for number in range(len(records))], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1_000_000


def test_a_run_that_went_on_from_a_checkpoint_is_drawn(tmp_path: Path) -> None:
    draw_runs([gone_on(simulated(), 100)], tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 50_000


def test_vector_figures_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw_runs([simulated()], tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.svg").read_text().count("<path") > len(simulated().events) / STEPS


def test_runs_are_named_after_their_folders(tmp_path: Path) -> None:
    def names(*folders: str) -> list[str]:
        return names_of([tmp_path / folder for folder in folders])

    assert names("a/plain", "a/adapted") == ["plain", "adapted"]
    assert names("a/run", "b/run", "c") == ["a/run", "b/run", "c"]
    assert names("a/run", "a/run") == ["a/run (1)", "a/run (2)"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    write_record(simulated(), folder)
    return folder


def test_the_command_writes_a_page_beside_the_run(run_folder: Path) -> None:
    done = ropebridge("report", run_folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(run_folder / "report.html")
    assert (run_folder / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_the_suffix_says_what_is_written(run_folder: Path, tmp_path: Path) -> None:
    targets = [tmp_path / f"one{suffix}" for suffix in (".html", ".png", ".svg", ".json")]
    done = ropebridge("report", run_folder, *(word for target in targets for word in ("-o", target)))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(target) for target in targets]
    assert struct.unpack(">I", (tmp_path / "one.png").read_bytes()[16:20]) == (1500,)
    assert "<svg" in (tmp_path / "one.svg").read_text()
    assert json.loads((tmp_path / "one.json").read_text())["traceEvents"]
    assert sorted(tmp_path.iterdir()) == sorted(targets)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("report.pdf", "let its name end in .html"),
        ("report", "let its name end in .html"),
        ("absent/report.html", "does not exist"),
    ],
)
def test_outputs_that_cannot_be_are_refused(output: str, words: str, run_folder: Path, tmp_path: Path) -> None:
    done = ropebridge("report", run_folder, "-o", tmp_path / "first.html", "-o", tmp_path / output)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_damaged_run_is_refused(run_folder: Path, tmp_path: Path) -> None:
    write_record(simulated(), tmp_path / "run")
    (tmp_path / "run" / "events.parquet").write_bytes(b"PAR1")
    done = ropebridge("report", tmp_path / "run")
    assert done.returncode == 2
    assert "the run is damaged" in done.stderr
    assert not (tmp_path / "run" / "report.html").exists()


def test_help_shows_an_example_and_every_kind() -> None:
    text = ropebridge("report", "--help").stdout
    for word in ("Example: ropebridge report", ".html", ".png", ".svg", ".json"):
        assert word in text


def test_computes_are_what_the_gantt_numbers() -> None:
    assert {FORWARD, BACKWARD} < set(COMPUTES)
