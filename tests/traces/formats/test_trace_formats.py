import json

import numpy as np
import pytest
from hypothesis import given

from tests.helpers.strategies.trace_strategies import link_traces
from traces.common.errors import InputError
from traces.formats import FORMATS, cooked, csv_units, iperf3_json, mahimahi
from traces.resample import merged
from traces.trace import LinkTrace


def trace_of(times_s: list[float], rates_bps: list[float], duration_s: float) -> LinkTrace:
    return LinkTrace(np.array(times_s), np.array(rates_bps), duration_s)


@given(link_traces(with_latency=True, loops=True))
def test_csv_round_trips_exactly(trace: LinkTrace) -> None:
    assert csv_units.read(csv_units.write(trace)) == trace


@given(link_traces(loops=True))
def test_iperf3_round_trips_exactly(trace: LinkTrace) -> None:
    assert iperf3_json.read(iperf3_json.write(trace)) == trace


@given(link_traces(loops=True))
def test_cooked_round_trips_with_equal_neighbours_merged(trace: LinkTrace) -> None:
    read, whole = cooked.read(cooked.write(trace)), merged(trace)
    assert read.times_s.tolist() == whole.times_s.tolist()
    assert read.bandwidth_bps.tolist() == whole.bandwidth_bps.tolist()
    assert read.duration_s == pytest.approx(whole.duration_s, rel=1e-15)


@pytest.mark.parametrize("seed", range(20))
def test_mahimahi_round_trips_exactly_and_keeps_any_window_to_a_packet(seed: int) -> None:
    random = np.random.default_rng(seed)
    edges_s = np.concatenate(([0.0], np.cumsum(random.integers(1, 2_000, 20)))) / 1e3
    rates_bps = random.uniform(0, 50e6, 20) * (random.random(20) > 0.3)
    trace = trace_of(edges_s[:-1].tolist(), rates_bps.tolist(), float(edges_s[-1]))
    read = mahimahi.read(mahimahi.write(trace))
    assert mahimahi.read(mahimahi.write(read)) == read
    assert read.duration_s == trace.duration_s
    bounds_s = np.sort(random.integers(0, round(edges_s[-1] * 1e3), (500, 2)), axis=1) / 1e3
    difference = read.bits_between(*bounds_s.T) - trace.bits_between(*bounds_s.T)
    assert np.abs(difference).max() <= mahimahi.PACKET_BITS + 1


@given(link_traces())
def test_exactly_one_format_recognises_what_a_writer_wrote(trace: LinkTrace) -> None:
    for written in FORMATS.values():
        if written.name != "mahimahi":
            text = written.write(trace)
            assert [known.name for known in FORMATS.values() if known.matches(text)] == [written.name]


@pytest.mark.parametrize(
    ("text", "times_s", "rates_bps", "duration_s"),
    [
        ("time_s,bandwidth_mbps\n0,1\n1,2\n2,0\n", [0, 1, 2], [1e6, 2e6, 0], 3),
        ("time_ms,bandwidth_gbps\n500,1\n1000,2\n", [0, 0.5], [1e9, 2e9], 1),
        ("bandwidth_kbps, time_us\r\n8,0\r\n", [0], [8e3], 1),
        ('"time_s","bandwidth_bps"\n0,7\n\n60,\n', [0], [7], 60),
    ],
)
def test_csv(text: str, times_s: list[float], rates_bps: list[float], duration_s: float) -> None:
    assert csv_units.read(text) == trace_of(times_s, rates_bps, duration_s)


def test_csv_latency() -> None:
    trace = csv_units.read("time_s,bandwidth_mbps,latency_ms\n0,1,40\n5,1,45.5\n")
    assert trace.latency_s is not None
    assert trace.latency_s.tolist() == [0.04, 0.0455]


@pytest.mark.parametrize("end", ["12,", "12,,"])
def test_a_last_row_with_only_a_time_is_the_end(end: str) -> None:
    trace = csv_units.read(f"time_s,bandwidth_mbps,latency_ms\n0,1,40\n5,1,45.5\n{end}\n")
    assert (trace.times_s.tolist(), trace.duration_s) == ([0.0, 5.0], 12.0)


def test_csv_written_out_in_full() -> None:
    trace = trace_of([0.0, 0.1, 0.4], [1e6, 0.0, 1 / 3], 1.5)
    assert csv_units.write(trace) == ("time_s,bandwidth_bps\n0.0,1000000.0\n0.1,0.0\n0.4,0.3333333333333333\n1.5,\n")


def test_cooked_rows_hold_until_the_next_and_start_at_zero() -> None:
    trace = cooked.read("10.0\t1.5\n15.0\t0.3\n20.0\t0\n")
    assert trace == trace_of([0, 5, 10], [1.5e6, 0.3e6, 0], 15)


@pytest.mark.parametrize(
    ("trace", "rows"),
    [
        (trace_of([0, 5], [1e6, 2e6], 10), ["0.0 1.0", "5.0 2.0"]),
        (trace_of([0, 5, 10], [1e6, 0, 2e6], 17), ["0.0 1.0", "5.0 0.0", "10.0 2.0", "12.0 2.0"]),
        (trace_of([0], [1e6], 1), ["0.0 1.0"]),
        (trace_of([0], [1e6], 60), ["0.0 1.0", "15.0 1.0", "30.0 1.0", "45.0 1.0"]),
    ],
    ids=["as it is", "longer last piece", "a second", "single piece"],
)
def test_cooked_repeats_the_last_rate_to_keep_the_duration(trace: LinkTrace, rows: list[str]) -> None:
    text = cooked.write(trace)
    assert text.replace("\t", " ").splitlines() == rows
    assert cooked.read(text) == trace


def test_mahimahi_opportunities_fill_the_millisecond_before_them() -> None:
    trace = mahimahi.read("0\n1\n3\n3\n5\n")
    assert trace == trace_of([0, 0.001, 0.002, 0.003, 0.004], [24e6, 0, 24e6, 0, 12e6], 0.005)


@pytest.mark.parametrize(
    ("trace", "stamps_ms"),
    [
        (trace_of([0], [12e6], 0.003), [1, 2, 3]),
        (trace_of([0], [24e6], 0.002), [1, 1, 2, 2]),
        (trace_of([0], [5e6], 0.01), [1, 3, 6, 8, 10]),
        (trace_of([0, 0.002], [12e6, 0], 0.005), [1, 5]),
        (trace_of([0], [1e3], 1), [1000]),
    ],
    ids=["one each", "two each", "left-over first", "ends in an outage", "less than a packet"],
)
def test_mahimahi_writes_the_last_opportunity_at_the_end(trace: LinkTrace, stamps_ms: list[int]) -> None:
    assert [int(line) for line in mahimahi.write(trace).splitlines()] == stamps_ms


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (trace_of([0], [0.0], 10), "carries nothing.*write csv"),
        (trace_of([0], [1e12], 1), "needs a line per 1500 bytes, 83,333,334.*at most 10,000,000: write csv"),
    ],
)
def test_mahimahi_refuses_what_it_cannot_hold(trace: LinkTrace, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mahimahi.write(trace)


def test_iperf3_leaves_out_what_was_omitted() -> None:
    sums = [(0.0, 1.0, 5e6, True), (0.0, 1.00004, 8e6, False), (1.00004, 2.0, 9e6, False)]
    intervals = [
        {"streams": [], "sum": {"start": a, "end": b, "seconds": b - a, "bits_per_second": r, "omitted": o}}
        for a, b, r, o in sums
    ]
    trace = iperf3_json.read(json.dumps({"start": {}, "intervals": intervals, "end": {}}))
    assert trace == trace_of([0, 1.00004], [8e6, 9e6], 2)
