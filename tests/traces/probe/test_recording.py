"""Recordings: the file, which no crash spoils, and `ropebridge traces record`."""

import fcntl
import json
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.networks.responders import free_port, responder, server
from tests.helpers.processes.command import COMMAND, ropebridge
from tests.helpers.processes.process_watch import started, wait_until
from traces.common.errors import InputError
from traces.formats import read_trace
from traces.formats.csv_units import RECORDING_HEADER
from traces.probe.conversation import GREETING
from traces.probe.recording import Recording, Sample

SAMPLES = st.builds(Sample, st.one_of(st.just(0.0), st.floats(1e3, 1e11)), st.floats(0, 2))
STEPS_S = st.floats(0.05, 1e4)


@contextmanager
def temporary_file() -> Iterator[Path]:
    """For property tests, whose every example needs a new one."""
    with TemporaryDirectory() as folder:
        yield Path(folder) / "link.csv"


def write(path: Path, samples: list[tuple[float, Sample]]) -> None:
    """Record samples, each so long after the one before."""
    with Recording(path) as recording:
        time_s = recording.end_s
        for step_s, sample in samples:
            recording.append(time_s, sample)
            time_s += step_s


# ---- the file


@given(st.lists(st.tuples(STEPS_S, SAMPLES), min_size=1, max_size=8))
def test_a_recording_is_a_trace(samples: list[tuple[float, Sample]]) -> None:
    with temporary_file() as path:
        write(path, samples)
        trace = read_trace(path)
    assert trace.bandwidth_bps == pytest.approx([each.bandwidth_bps for _, each in samples], abs=1.0)
    assert trace.latency_s is not None
    assert trace.latency_s == pytest.approx([each.latency_s for _, each in samples], abs=1e-6)
    starts_s = [sum(step_s for step_s, _ in samples[:number]) for number in range(len(samples))]
    assert trace.times_s == pytest.approx(starts_s, abs=0.001 * len(samples))


# Each example is cut off at all of its bytes, and each cut is synchronised with the disk.
@settings(max_examples=15)
@given(st.lists(st.tuples(STEPS_S, SAMPLES), min_size=1, max_size=4), SAMPLES)
def test_cut_off_at_any_byte_it_is_readable_and_goes_on(samples: list[tuple[float, Sample]], more: Sample) -> None:
    with temporary_file() as path:
        write(path, samples)
        whole = path.read_bytes()
        rows = whole.splitlines(keepends=True)
        for length in range(len(whole) + 1):
            path.write_bytes(whole[:length])
            kept = whole[:length].count(b"\n") - 1
            if kept > 0:
                assert len(read_trace(path).times_s) == kept
            else:
                with pytest.raises(InputError):
                    read_trace(path)
            with Recording(path) as recording:
                assert recording.samples == max(0, kept)
                recording.append(recording.end_s, more)
            after = path.read_bytes().splitlines(keepends=True)
            # Nothing of before is lost or there twice, and one row is new.
            assert after[:-1] == rows[: max(1, kept + 1)]
            trace = read_trace(path)
            assert trace.bandwidth_bps[-1] == pytest.approx(more.bandwidth_bps, abs=1.0)
            assert len(trace.times_s) == max(0, kept) + 1


def test_a_recording_goes_on_where_its_last_sample_ends(tmp_path: Path) -> None:
    path = tmp_path / "link.csv"
    write(path, [(10.0, Sample(1e6, 0.01))] * 3)
    assert read_trace(path).duration_s == 30.0
    write(path, [(10.0, Sample(2e6, 0.01))])
    trace = read_trace(path)
    # No time passed in between: nobody knows what the link carried then.
    assert trace.times_s.tolist() == [0.0, 10.0, 20.0, 30.0]
    assert float(trace.bits_between(0.0, 40.0)) == 3 * 10e6 + 20e6


def test_times_rise_whatever_the_clock_says(tmp_path: Path) -> None:
    path = tmp_path / "link.csv"
    with Recording(path) as recording:
        for time_s in (0.0, 0.0001, 0.00011):
            recording.append(time_s, Sample(1e6, 0.01))
    assert read_trace(path).times_s.tolist() == [0.0, 0.001, 0.002]


@pytest.mark.parametrize(
    "content",
    [
        "time_s,bandwidth_mbps\n0,10\n10,20\n",
        "any text\n",
        f"{RECORDING_HEADER}0.000,10.000000,5.000\n0.000,10.000000,5.000\n",
        f"{RECORDING_HEADER}0.000,ten,5.000\n",
        f"{RECORDING_HEADER}0.000,10.000000,5.000\n20.000,,\n",
    ],
)
def test_what_is_no_recording_is_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "link.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=str(path)), Recording(path):
        pass
    assert path.read_text() == content


def test_only_one_recorder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "link.csv"
    with Recording(path) as recording:
        recording.append(0.0, Sample(1e6, 0.01))
        with pytest.raises(InputError, match="another recorder writes this file"), Recording(path):
            pass
        recording.append(1.0, Sample(1e6, 0.01))
    with Recording(path) as recording:
        assert recording.samples == 2


def test_a_recording_that_another_recorder_removes_before_the_lock_is_an_error_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorder removes its file if its first row cannot be written."""
    path, flock = tmp_path / "link.csv", fcntl.flock
    path.touch()

    def late_flock(file: IO[bytes], operation: int) -> None:
        path.unlink(missing_ok=True)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late_flock)
    with pytest.raises(InputError, match="cannot be written: No such file"), Recording(path):
        pass


def test_two_recorders_that_begin_together_do_not_overwrite_each_other(tmp_path: Path) -> None:
    path = tmp_path / "link.csv"
    with Recording(path) as first, Recording(path) as second:
        first.append(0.0, Sample(1e6, 0.01))
        content = path.read_bytes()
        with pytest.raises(InputError, match="File exists"):
            second.append(0.0, Sample(2e6, 0.01))
    assert path.read_bytes() == content


def test_nothing_is_written_before_the_first_sample(tmp_path: Path) -> None:
    with Recording(tmp_path / "link.csv"):
        pass
    assert list(tmp_path.iterdir()) == []


# ---- the command

# More than socket buffers take, so that a reader who waits for a core does not find all of a burst at once.
QUICK = ["--every", "100 ms", "--traffic", "40 MB"]


def record(address: str, path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return ropebridge("traces", "record", address, "-o", path, *QUICK, *options)


def test_a_recording_shows_and_simulates(tmp_path: Path) -> None:
    path = tmp_path / "link.csv"
    with responder(tmp_path / "far") as (address, process):
        done = record(address, path, "--duration", "400 ms", "--json", "--reverse")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        first = found["samples"]
        # One each 100 ms, but for those that were due while other processes had the cores.
        assert 1 <= first == found["new"] <= 4
        assert max(read_trace(path).bandwidth_bps) > 0
        # Going on, as text.
        done = record(address, path, "--duration", "200 ms")
        assert done.returncode == 0, done.stderr
        pieces = len(read_trace(path).times_s)
        assert first < pieces <= first + 2
        assert done.stdout.startswith(f"{path}: {pieces} samples, {pieces - first} of them new")
        assert f"after {first} samples" in done.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    shown = json.loads(ropebridge("traces", "show", path, "--json").stdout)
    assert shown["pieces"] == pieces
    scenario = (tmp_path / "scenario.yaml").resolve()
    scenario.write_text(SCENARIO.format(trace=path))
    done = ropebridge("simulate", scenario, "--steps", "2")
    assert done.returncode == 0, done.stderr


SCENARIO = """
name: recorded
model:
  name: one-layer
  layers: [{{name: block, repeat: 2, parameters: 1 MB, output: 1 MB, activation: 1 MB, forward: 1 GFLOP}}]
cluster:
  devices:
    - {{name: one, kind: jetson-nano, region: here}}
    - {{name: two, kind: jetson-nano, region: there}}
  links:
    - {{between: [here, there], latency: 5 ms, trace: {{file: {trace}}}}}
training: {{global_batch: 4}}
"""


def test_a_killed_recorder_loses_nothing_and_the_next_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "link.csv"
    with responder(tmp_path / "far") as (address, _):
        (tmp_path / "near").mkdir()
        with started(["traces", "record", address, "-o", str(path), *QUICK], tmp_path / "near") as (process, _):
            wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") > 4, "nothing is recorded")
            process.kill()
            process.wait()
        before = path.read_bytes()
        times_s = read_trace(path).times_s
        assert len(times_s) == before[: before.rfind(b"\n") + 1].count(b"\n") - 1
        done = record(address, path, "--duration", "200 ms")
        assert done.returncode == 0, done.stderr
    after = read_trace(path)
    assert path.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert after.times_s[: len(times_s)].tolist() == times_s.tolist()
    assert len(times_s) < len(after.times_s) <= len(times_s) + 2


def test_ctrl_c_ends_a_recording_that_has_no_end(tmp_path: Path) -> None:
    path = tmp_path / "link.csv"
    with responder(tmp_path / "far") as (address, far):
        (tmp_path / "near").mkdir()
        with started(["traces", "record", address, "-o", str(path), *QUICK], tmp_path / "near") as (process, _):
            wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") > 2, "nothing is recorded")
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert said.startswith(f"{path}: ")
        assert "Traceback" not in errors
        # The far end serves on.
        assert far.poll() is None
        assert record(address, path, "--duration", "100 ms").returncode == 0


def test_a_peer_that_goes_away_is_an_outage_until_it_is_back(tmp_path: Path) -> None:
    path, port = tmp_path / "link.csv", free_port()
    address = f"127.0.0.1:{port}"
    for name in ("near", "far", "again"):
        (tmp_path / name).mkdir()

    def rows() -> list[float]:
        # A file that was just created has no row yet.
        begun = path.exists() and path.read_bytes().count(b"\n") > 1
        return read_trace(path).bandwidth_bps.tolist() if begun else []

    def listening() -> Any:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    far = ["profile", "network", "--listen", address]
    with started(far, tmp_path / "far") as (first, _):
        wait_until(listening, "nothing listens")
        with started(["traces", "record", address, "-o", str(path), *QUICK], tmp_path / "near") as (process, _):
            wait_until(rows, "nothing is recorded")
            first.terminate()
            first.wait(timeout=30)
            wait_until(lambda: rows()[-1] == 0.0, "no outage is recorded")
            with started(far, tmp_path / "again") as (second, _):
                wait_until(lambda: rows()[-1] > 0.0, "the recording does not go on")
                process.send_signal(signal.SIGTERM)
                _, errors = process.communicate(timeout=30)
                second.terminate()
                second.wait(timeout=30)
    assert process.returncode == 0, errors
    assert "outage: nothing listens at" in errors
    rates_bps = rows()
    first_dark = rates_bps.index(0.0)
    assert all(rates_bps[:first_dark])
    assert rates_bps[-1] > 0


def refused_by(answer: Any, tmp_path: Path) -> str:
    """What the recorder says of somebody who answers like that."""
    with server(answer) as address:
        done = record(address, tmp_path / "link.csv")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()[1:]
    return line


def test_somebody_else_who_listens_is_refused(tmp_path: Path) -> None:
    for answer, reason in (
        (lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n"), "it starts with b'SSH-2.0-OpenSSH_"),
        (lambda connection: time.sleep(1.5), "it sends nothing"),
    ):
        assert reason in refused_by(answer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_who_hangs_up_is_a_failure(tmp_path: Path) -> None:
    def greet(connection: socket.socket) -> None:
        connection.sendall(GREETING)
        connection.recv(1000)

    with server(greet) as address:
        done = record(address, tmp_path / "link.csv")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{address} closed the connection" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--every", "10"], "'10' has no unit"),
        (["--every", "1 ms"], "--every: a sample every 0.001 s is too often; give 0.1 s or more"),
        (["--traffic", "0 B"], "--traffic and --connections: a burst of 0 bytes"),
        (["--connections", "0"], "--traffic and --connections: a burst of 0 connections"),
        (["--duration", "0 s"], "--duration: a recording of 0 s"),
    ],
)
def test_orders_that_make_no_sense_are_refused(options: list[str], message: str, tmp_path: Path) -> None:
    done = ropebridge("traces", "record", "127.0.0.1", "-o", tmp_path / "link.csv", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nobody_there_is_refused(tmp_path: Path) -> None:
    for address, message in (
        (f"127.0.0.1:{free_port()}", "nothing listens at 127.0.0.1"),
        ("my..host", "'my..host' is not an address"),
        ("a" * 64, "is not an address"),
        ("no-such-host.invalid", "there is no host 'no-such-host.invalid'"),
        ("127.0.0.1:http", "'http' in '127.0.0.1:http' is not a port"),
    ):
        done = record(address, tmp_path / "link.csv")
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    for path, message in (
        (tmp_path / "none" / "link.csv", "does not exist; create it first"),
        (tmp_path, "is a folder"),
        (Path("/dev/null"), "is a device"),
    ):
        done = record(address, path)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_ends_the_recording_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "link.csv"
    with responder(tmp_path / "far") as (address, _):
        command = shlex.join([*COMMAND, "traces", "record", address, "-o", str(path), *QUICK])
        limited = ["bash", "-c", f"ulimit -f 0; PYTHONDONTWRITEBYTECODE=1 {command}"]
        done = subprocess.run(limited, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{path} cannot be written: File too large" in done.stderr.splitlines()[-1]
    assert not path.exists()
