import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from traces.common.errors import InputError
from traces.formats import FORMATS, format_of_suffix, read_trace, write_trace
from traces.resample import resampled
from traces.trace import LinkTrace


def iperf3(**sums: float | None) -> str:
    first = {"start": 0, "end": 1, "bits_per_second": 5, "omitted": False}
    return json.dumps({"intervals": [{"sum": first}, {"sum": {"start": 1, "end": 2, **sums}}]})


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        ("", "", "is empty; a trace is csv: a header with units"),
        (" \n\n", "", "is empty"),
        # Comments may say units that formats without a header do not have.
        ("# time_s bandwidth_kbps\n0 1000\n", "", "starts with '# time_s bandwidth_kbps', which is no known"),
        ("# noon\ntime_s,bandwidth_mbps\n0,1\n # a pause\n5,x\n", ":5", "bandwidth 'x' is not a number"),
        (b"PK\x03\x04\x00\x00", "", "is a binary file; a trace is csv"),
        (gzip.compress(b"0 1\n5 2\n", mtime=0), "", "is a binary file"),
        (b"0 1\n5 \xff\n", "", "is not UTF-8 text at byte 6; a trace is csv"),
        ("<html>", "", "starts with '<html>', which is no known trace format; a trace is csv"),
        ("1 2 3\n", "", "starts with '1 2 3', which is no known trace format"),
        ("time,bandwidth_mbps\n0,1\n", ":1", "column 'time' has no unit; valid columns are time_s, time_ms"),
        (
            "time_s,bandwidth_mb\n0,1\n",
            ":1",
            "column 'bandwidth_mb' is unknown or has an unknown unit; valid",
        ),
        ("time_s,time_ms,bandwidth_bps\n0,0,1\n", ":1", "there are 2 columns of time"),
        ("time_s,latency_s\n0,0\n", ":1", "there is no column of bandwidth"),
        ("time_s,bandwidth_mbps\n", ":1", "no row follows the header"),
        ("time_s,bandwidth_mbps\n0,1\n1,2,3\n", ":3", "the row has 3 columns; the header names 2"),
        ("time_s,bandwidth_mbps\n0,1\n\n1,fast\n", ":4", "bandwidth 'fast' is not a number"),
        ("time_s,bandwidth_mbps\n0,1\n1,\n2,3\n", ":3", "bandwidth '' is not a number"),
        ("time_s,bandwidth_mbps\n0,1\n1,-2\n", ":3", "bandwidth '-2' is negative"),
        ("time_s,bandwidth_mbps\n0,1\n1,nan\n", ":3", "bandwidth 'nan' is not a number"),
        ("time_s,bandwidth_mbps\n0,1\n1,1e999\n", ":3", "bandwidth '1e999' is too large"),
        ("time_s,bandwidth_mbps\n0,1\n5,2\n5,3\n", ":4", "time goes from 5 s to 5 s; times must rise"),
        ("0 1\n5 2\n3 1\n", ":3", "time goes from 5 s to 3 s; times must rise"),
        ("0 1\n5 -2\n", ":2", "rate '-2' is negative"),
        ("nan 1\n5 2\n", ":1", "time 'nan' is not a number"),
        ("0 1\n5 2 3\n", ":2", "'5 2 3' has 3 columns; a row is two numbers"),
        ("1\n\n2\n1.5\n", ":4", "'1.5' is not a whole number; a line is the whole millisecond"),
        ("1\n99999999999999999999\n", ":2", "'99999999999999999999' is not a whole number"),
        ("1\n5\n\n3\n", ":4", "time goes from 5 ms to 3 ms"),
        ("-1\n5\n", ":1", "time starts at -1 ms"),
        ('{"intervals": [\n,]}', ":2", "is not JSON"),
        ('{"a": 1}', ": intervals", "there is no list of intervals; give the output of `iperf3"),
        ('{"intervals": []}', ": intervals", "no interval was measured"),
        ('{"intervals": [{}]}', r": intervals\[0\].sum", "the interval has no sum"),
        ('{"error": "unable to connect"}', "", "iperf3 failed: unable to connect"),
        (iperf3(), r": intervals\[1\].sum", "bits_per_second is null"),
        (
            iperf3(bits_per_second=-1),
            r": intervals\[1\].sum",
            "bits_per_second is -1; it must be finite and not",
        ),
        (iperf3(bits_per_second=float("nan")), r": intervals\[1\].sum", "bits_per_second is nan"),
        (
            iperf3(bits_per_second=1, start=0),
            r": intervals\[1\].sum",
            "time goes from 0 s to 0 s; times must rise",
        ),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(
    tmp_path: Path, content: str | bytes, place: str, message: str
) -> None:
    path = tmp_path / "wrong"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=f"^{path}{place}: {message}"):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{tmp_path}/none: cannot be read: No such file"):
        read_trace(tmp_path / "none")


def test_the_reader_says_whether_the_trace_loops(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("\ufefftime_s,bandwidth_bps\n0,1\n", encoding="utf-8")
    assert read_trace(path).loops
    assert not read_trace(path, loops=False).loops


def test_rows_of_csv_that_begin_with_a_hash_are_comments(tmp_path: Path) -> None:
    trace = LinkTrace(np.array([0.0, 0.5]), np.array([12e6, 24e6]), 1.0)
    path = tmp_path / "trace"
    path.write_text("".join(f"# 1 2\n\n{row}\n" for row in FORMATS["csv"].write(trace).splitlines()))
    assert read_trace(path) == trace


@pytest.mark.parametrize("name", FORMATS)
def test_files_of_every_format_are_recognised(tmp_path: Path, name: str) -> None:
    trace = LinkTrace(np.array([0.0, 0.5]), np.array([12e6, 24e6]), 1.0)
    path = tmp_path / f"trace{FORMATS[name].suffixes[0]}"
    write_trace(trace, path, format_of_suffix(path))
    assert read_trace(path) == trace
    assert list(tmp_path.iterdir()) == [path]


def test_an_unknown_format_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    trace = LinkTrace(np.zeros(1), np.ones(1), 1.0)
    with pytest.raises(InputError, match=r"unknown trace format 'cvs'; did you mean 'csv'.*mahimahi"):
        write_trace(trace, tmp_path / "trace", "cvs")
    with pytest.raises(InputError, match=r"the suffix '.txt' stands for no trace format.*\.mahi"):
        format_of_suffix("trace.txt")


@pytest.mark.slow
def test_every_recorded_broadband_trace_reads_and_survives_mahimahi(shared_folder: Path) -> None:
    paths = sorted((shared_folder / "traces" / "fcc_mba_2016" / "traces").iterdir())
    assert len(paths) == 59
    for path in paths:
        trace = read_trace(path)
        packets = FORMATS["mahimahi"].read(FORMATS["mahimahi"].write(trace))
        windows = FORMATS["cooked"].read(FORMATS["cooked"].write(resampled(packets, 5.0)))
        assert windows.duration_s == trace.duration_s
        starts_s = np.arange(0, trace.duration_s, 5.0)
        bits = trace.bits_between(starts_s, starts_s + 5)
        for kept in (packets, windows):
            assert kept.bits_between(starts_s, starts_s + 5) == pytest.approx(bits, abs=12_001), path.name


def test_a_recorded_trace_survives_mahimahi_packet_by_packet(shared_folder: Path) -> None:
    folder = shared_folder / "traces" / "fcc_mba_2016" / "traces"
    trace = read_trace(folder / "trace_10367_http---www.facebook.com")
    packets = FORMATS["mahimahi"].read(FORMATS["mahimahi"].write(trace))
    assert FORMATS["cooked"].read(FORMATS["cooked"].write(packets)) == packets
