"""Nodes that come and go over time, and the three formats of such traces."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.common.errors import InputError
from traces.common.text import write_scaled
from traces.formats import read_trace
from traces.preemption.files import PREEMPTION_FORMATS, read_preemption
from traces.preemption.trace import (
    NodeChange,
    PreemptionStatistics,
    PreemptionTrace,
    describe_preemption,
    trace_of_counts,
)

PUBLISHED = Path(__file__).parents[4] / "shared" / "traces"

EVENTS = "0,add,node1\n0,add,node2\n1500,remove,node1\n1500,add,node3\n4000,add,node1\n9000,remove,node2\n"


@st.composite
def preemption_traces(draw: st.DrawFn) -> PreemptionTrace:
    """Up to 20 changes of up to 5 nodes, at any times."""
    steps = draw(st.lists(st.tuples(st.floats(0, 1e4), st.integers(1, 5)), max_size=20))
    here: set[str] = set()
    changes, time_s = [], 0.0
    for wait_s, number in steps:
        time_s, node = time_s + wait_s, f"node{number}"
        changes.append(NodeChange(time_s, node, node not in here))
        here ^= {node}
    return PreemptionTrace(tuple(changes), time_s)


def test_who_is_there_when(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text(EVENTS)
    trace = read_preemption(path)
    assert trace.nodes == ("node1", "node2", "node3")
    assert trace.presences == {
        "node1": ((0.0, 1.5), (4.0, math.inf)),
        "node2": ((0.0, 9.0),),
        "node3": ((1.5, math.inf),),
    }
    assert [present_at(trace, time_s) for time_s in (0, 1.5, 4, 100)] == [2, 2, 3, 2]
    assert trace.counts == ((0.0, 2), (4.0, 3), (9.0, 2))
    assert trace.duration_s == 9.0


def test_of_counts_the_highest_number_leaves_first() -> None:
    trace = trace_of_counts([(0.0, 2), (10.0, 3), (20.0, 1)], 30.0)
    assert trace.presences == {
        "node1": ((0.0, math.inf),),
        "node2": ((0.0, 20.0),),
        "node3": ((10.0, 20.0),),
    }
    assert trace.counts == ((0.0, 2), (10.0, 3), (20.0, 1))


@given(preemption_traces())
def test_counts_are_those_of_who_is_there(trace: PreemptionTrace) -> None:
    for time_s, count in trace.counts:
        assert present_at(trace, time_s) == count


def present_at(trace: PreemptionTrace, time_s: float) -> int:
    intervals = [interval for each in trace.presences.values() for interval in each]
    return sum(start_s <= time_s < end_s for start_s, end_s in intervals)


@given(preemption_traces().filter(lambda trace: trace.changes))
def test_node_events_are_read_exactly(trace: PreemptionTrace) -> None:
    rows = [(write_scaled(e.time_s, 3), "add" if e.arrives else "remove", e.node) for e in trace.changes]
    text = "".join(f"{','.join(row)}\n" for row in rows)
    known = PREEMPTION_FORMATS["node-events"]
    assert known.matches(text)
    assert known.read(text) == trace


COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=30)


@given(COUNTS, st.integers(1, 10**6))
def test_spot_counts_hold_for_a_gap_each(counts: list[int], gap_ms: int) -> None:
    trace = PREEMPTION_FORMATS["spot-counts"].read(spot_text(counts, gap_ms / 1e3))
    assert [present_at(trace, (i + 0.5) * gap_ms / 1e3) for i in range(len(counts))] == counts
    assert trace.duration_s == len(counts) * (gap_ms / 1e3)


def spot_text(counts: list[int], gap_s: float) -> str:
    return json.dumps({"metadata": {"gap_seconds": gap_s}, "data": counts})


@given(COUNTS, st.integers(2, 1000))
def test_gpu_counts_hold_until_the_next_time(counts: list[int], gap_s: int) -> None:
    trace = PREEMPTION_FORMATS["gpu-counts"].read(gpu_text(counts, gap_s))
    assert [present_at(trace, (i + 0.5) * gap_s) for i in range(len(counts))] == counts
    assert trace.duration_s == ((len(counts) - 1) * gap_s + (gap_s if len(counts) > 1 else 1))


def gpu_text(counts: list[int], gap_s: int) -> str:
    return json.dumps([{"Time": 5 + i * gap_s, "GPUs": count} for i, count in enumerate(counts)])


def test_the_gap_may_stand_beside_the_data() -> None:
    read = PREEMPTION_FORMATS["spot-counts"].read
    assert read('{"gap_seconds": 60, "data": [1, 0]}') == read('{"data": [1, 0], "metadata": {"gap_seconds": 60}}')


def test_no_text_matches_two_formats() -> None:
    texts = {"node-events": EVENTS, "spot-counts": spot_text([2, 3, 1], 10.0), "gpu-counts": gpu_text([2, 3, 1], 10)}
    for name, text in texts.items():
        assert [known.name for known in PREEMPTION_FORMATS.values() if known.matches(text)] == [name]


@pytest.mark.parametrize(
    ("content", "place", "problem"),
    [
        ("", "", "is empty; a pre-emption trace is node-events: rows such as"),
        ("0,1\n", "", "starts with '0,1', which is no known pre-emption trace"),
        ("0,add,a\nx,add,b\n", ":2", "time 'x' is not a number"),
        ("0,add,a\n1,ad,b\n", ":2", "'ad' is no change; a row is milliseconds, 'add' or 'remove'"),
        ("0,add,a\n1,add\n", ":2", "'1,add' has 2 columns"),
        ("0,add,\n", ":1", "the node has no name"),
        ("5,add,a\n\n1,add,b\n", ":3", "time goes from 0.005 s to 0.001 s; times must not fall"),
        ("0,add,a\n1,add,a\n", ":2", "node 'a' arrives but is there already"),
        ("0,add,a\n1,remove,b\n", ":2", "node 'b' leaves but is not there; a node arrives, then leaves"),
        ('{"data": [1]}', ": gap_seconds", "null is not a number"),
        ('{"gap_seconds": 0, "data": [1]}', ": gap_seconds", "the gap is 0 s; it must be above zero"),
        ('{"gap_seconds": 60}', ": data", "there is no list of counts; give"),
        ('{"gap_seconds": 60, "data": [1, -1]}', ": data[1]", "-1 is out of range"),
        ('{"gap_seconds": 60, "data": [1, 1.5]}', ": data[1]", "1.5 is not a count; give a whole number of nodes"),
        ('{"gap_seconds": 60,\n"data": [1', ":2", "is not JSON"),
        ("[]", "", "is not a JSON list with something in it"),
        ('[{"Time": 0, "GPU": 1}]', ": [0]", '{"Time": 0, "GPU": 1} is not a row; give'),
        ('[{"Time": 0, "GPUs": 1}, {"Time": 0, "GPUs": 1}]', ": [1].Time", "time goes from 0 s to 0 s"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(content: str, place: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        read_preemption(path)
    assert str(caught.value).startswith(f"{path}{place}: {problem}")


def test_a_format_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text(EVENTS)
    assert read_preemption(path, "node-events") == read_preemption(path)
    with pytest.raises(InputError, match="unknown pre-emption format 'node-event'; did you mean 'node-events'"):
        read_preemption(path, "node-event")


@pytest.mark.parametrize("duration_s", [1.0, math.inf, math.nan])
def test_a_trace_lasts_until_its_last_change_at_least(duration_s: float) -> None:
    with pytest.raises(InputError, match="the duration must be finite and not before the last change"):
        PreemptionTrace((NodeChange(2.0, "a", True),), duration_s)


def test_a_trace_of_pre_emptions_is_no_link_trace(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text('{"metadata": {"gap_seconds": 60}, "data": [1]}')
    with pytest.raises(InputError, match="is a trace of pre-emptions, not of a link"):
        read_trace(path)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published traces are not here")
@pytest.mark.parametrize(
    ("name", "changes", "most", "last"),
    [
        ("bamboo/traces/p3-trace.csv", 344, 32, 10),
        ("bamboo/traces/g4dn-trace.csv", 153, None, 5),
        ("sailor/availability/a100_trace.json", None, 4, 3),
        ("sailor/availability/a100_trace_16.json", None, 14, 12),
    ],
)
def test_published_traces(name: str, changes: int | None, most: int | None, last: int) -> None:
    trace = read_preemption(PUBLISHED / name)
    counts = [count for _, count in trace.counts]
    assert counts[-1] == last == present_at(trace, trace.duration_s)
    assert changes is None or len(trace.changes) == changes
    assert most is None or max(counts) == most


def test_statistics() -> None:
    trace = trace_of_counts([(0.0, 2), (10.0, 0), (15.0, 3)], 20.0)
    assert describe_preemption(trace) == PreemptionStatistics(
        duration_s=20.0,
        nodes=3,
        arrivals=5,
        departures=2,
        mean_between_departures_s=10.0,
        mean_count=(20 + 15) / 20,
        least_count=0,
        most_count=3,
        empty_share=0.25,
    )
    assert describe_preemption(PreemptionTrace((), 0.0)).mean_between_departures_s is None
