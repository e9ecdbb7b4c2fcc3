"""The agent tells a rank that stands still from one that goes on, may go on yet, or has not begun."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.core.liveness import LivenessProbe
from executor.core.timeouts import Timeouts
from planner.scenario.faults import HANG_LIMIT_S
from tests.helpers.processes.process_watch import wait_until

# One a second.
STOPPED_CHECKS, SILENT_CHECKS = round(Timeouts().stopped_s), round(Timeouts().silent_s)


def probe(process: "subprocess.Popen[bytes]", path: Path) -> LivenessProbe:
    return LivenessProbe(process.pid, path, STOPPED_CHECKS, SILENT_CHECKS, 1.0)


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        yield sleeping
        sleeping.kill()


@pytest.fixture
def path(process: "subprocess.Popen[bytes]", tmp_path: Path) -> Path:
    """The file that the process should touch."""
    path = tmp_path / "beat"
    path.touch()
    return path


def state(process: "subprocess.Popen[bytes]") -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().split()[2]


def test_who_touches_its_file_goes_on(path: Path, process: "subprocess.Popen[bytes]") -> None:
    seen = probe(process, path)
    for check in range(2 * SILENT_CHECKS):
        os.utime(path, ns=(check, check))
        assert seen.check() == ""


def test_who_does_not_touch_its_file_for_a_minute_stands_still(path: Path, process: "subprocess.Popen[bytes]") -> None:
    seen = probe(process, path)
    assert [seen.check() for _ in range(SILENT_CHECKS)] == [""] * SILENT_CHECKS
    assert seen.check() == "its process has not touched its heartbeat file for 60 s"
    process.kill()
    process.wait()
    assert seen.check() == ""


@given(pauses=st.lists(st.integers(1, 300), min_size=1, max_size=20), lasts=st.integers(0, 700))
def test_who_was_silent_before_may_be_silent_again(pauses: list[int], lasts: int) -> None:
    """A silence ends a process only outside the distribution of its own pauses: at more than twice the longest one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "beat"
        path.touch()
        seen = LivenessProbe(os.getpid(), path, STOPPED_CHECKS, SILENT_CHECKS, 1.0)
        limit = SILENT_CHECKS
        seen.check()
        for number, pause in enumerate(pauses):
            suspected = [seen.check() for _ in range(pause)]
            assert any(suspected) == (pause >= limit)
            if any(suspected):
                break
            limit = max(limit, 2 * pause)
            os.utime(path, ns=(number, number))
            assert seen.check() == ""
        else:
            suspected = [seen.check() for _ in range(lasts)]
            assert any(suspected) == (lasts >= limit)


def test_who_is_stopped_may_go_on_for_a_while(path: Path, process: "subprocess.Popen[bytes]") -> None:
    seen = probe(process, path)
    for stop in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
        process.send_signal(stop)
        wait_until(lambda stop=stop: (state(process) == "T") == (stop == signal.SIGSTOP), "the signal does nothing")
        assert [seen.check() for _ in range(STOPPED_CHECKS - 1)] == [""] * (STOPPED_CHECKS - 1)
    assert seen.check() == "its process was stopped by a signal, and not continued for 10 s"


def test_who_has_not_begun_is_left_alone(tmp_path: Path, process: "subprocess.Popen[bytes]") -> None:
    seen = probe(process, tmp_path / "beat")
    assert {seen.check() for _ in range(2 * SILENT_CHECKS)} == {""}


def test_the_simulator_gives_up_a_stopped_device_when_the_agent_does() -> None:
    assert Timeouts().stopped_recovering_s == HANG_LIMIT_S
