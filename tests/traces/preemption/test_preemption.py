"""Who is there when, and the three formats that say so."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.common.errors import InputError
from traces.formats import read_trace
from traces.preemption.files import PREEMPTION_FORMATS, read_preemption, write_preemption
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
    assert [trace.present_at(time_s) for time_s in (0, 1.5, 4, 100)] == [
        ("node1", "node2"),
        ("node2", "node3"),
        ("node1", "node2", "node3"),
        ("node1", "node3"),
    ]
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
        assert len(trace.present_at(time_s)) == count


@given(preemption_traces().filter(lambda trace: trace.changes))
def test_node_events_and_back(trace: PreemptionTrace) -> None:
    known = PREEMPTION_FORMATS["node-events"]
    assert known.matches(known.write(trace))
    assert known.read(known.write(trace)) == trace


COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=30)


@given(COUNTS, st.integers(1, 10**6))
def test_spot_counts_and_back(counts: list[int], gap_ms: int) -> None:
    text = json.dumps({"metadata": {"gap_seconds": gap_ms / 1e3}, "data": counts})
    known = PREEMPTION_FORMATS["spot-counts"]
    trace = known.read(text)
    assert [len(trace.present_at((i + 0.5) * gap_ms / 1e3)) for i in range(len(counts))] == counts
    if gap_ms % 1000 == 0:
        again = known.read(known.write(trace))
        assert (again.changes, again.duration_s) == (trace.changes, trace.duration_s)


@given(COUNTS, st.integers(1, 1000))
def test_gpu_counts_and_back(counts: list[int], gap_s: int) -> None:
    known = PREEMPTION_FORMATS["gpu-counts"]
    trace = trace_of_counts([(float(i * gap_s), count) for i, count in enumerate(counts)], float(len(counts) * gap_s))
    again = known.read(known.write(trace))
    assert (again.changes, again.duration_s) == (trace.changes, trace.duration_s)


def test_the_gap_may_stand_beside_the_data() -> None:
    read = PREEMPTION_FORMATS["spot-counts"].read
    assert read('{"gap_seconds": 60, "data": [1, 0]}') == read('{"data": [1, 0], "metadata": {"gap_seconds": 60}}')


def test_no_text_matches_two_formats() -> None:
    trace = trace_of_counts([(0.0, 2), (10.0, 3), (20.0, 1)], 30.0)
    for known in PREEMPTION_FORMATS.values():
        text = known.write(trace)
        assert [other.name for other in PREEMPTION_FORMATS.values() if other.matches(text)] == [known.name]


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


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    trace = PREEMPTION_FORMATS["node-events"].read(EVENTS)
    write_preemption(trace, tmp_path / "nodes", "node-events")
    assert (tmp_path / "nodes").read_text() == EVENTS


@pytest.mark.parametrize(
    ("trace", "format_name", "message"),
    [
        (PreemptionTrace((), 5.0), "node-events", "no changes"),
        (PreemptionTrace((NodeChange(0.0, "a,b", True),), 5.0), "node-events", "node 'a,b' cannot stand in a row"),
        (PreemptionTrace((NodeChange(math.pi, "a", True),), 5.0), "spot-counts", "no gap"),
        (PreemptionTrace((), 0.0), "spot-counts", "no gap"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(trace: PreemptionTrace, format_name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PREEMPTION_FORMATS[format_name].write(trace)


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
    assert counts[-1] == last == len(trace.present_at(trace.duration_s))
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
