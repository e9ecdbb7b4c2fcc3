"""The agent tells a rank that stands still from one that goes on, may go on yet, or has not begun."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.core.liveness import SILENT_LOOKS, STOPPED_LOOKS, LivenessProbe
from tests.helpers.processes.process_watch import wait_until


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        yield sleeping
        sleeping.kill()


@pytest.fixture
def path(process: "subprocess.Popen[bytes]", tmp_path: Path) -> Path:
    """The file that the process should touch."""
    path = tmp_path / "beat"
    path.write_text(str(process.pid))
    return path


def state(process: "subprocess.Popen[bytes]") -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().split()[2]


def test_who_touches_its_file_goes_on(path: Path) -> None:
    pulse = LivenessProbe(path, STOPPED_LOOKS, SILENT_LOOKS, 1.0)
    for look in range(2 * SILENT_LOOKS):
        os.utime(path, ns=(look, look))
        assert pulse.look() == ""


def test_who_does_not_touch_its_file_for_a_minute_stands_still(path: Path, process: "subprocess.Popen[bytes]") -> None:
    pulse = LivenessProbe(path, STOPPED_LOOKS, SILENT_LOOKS, 1.0)
    assert [pulse.look() for _ in range(SILENT_LOOKS)] == [""] * SILENT_LOOKS
    assert pulse.look() == "its process has given no sign of life for 60 s"
    pulse.end()
    assert process.wait() == -signal.SIGTERM
    assert pulse.look() == ""


def test_who_is_stopped_may_go_on_for_a_while(path: Path, process: "subprocess.Popen[bytes]") -> None:
    pulse = LivenessProbe(path, STOPPED_LOOKS, SILENT_LOOKS, 1.0)
    for stop in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
        process.send_signal(stop)
        wait_until(lambda stop=stop: (state(process) == "T") == (stop == signal.SIGSTOP), "the signal does nothing")
        assert [pulse.look() for _ in range(STOPPED_LOOKS - 1)] == [""] * (STOPPED_LOOKS - 1)
    assert pulse.look() == "its process was stopped by a signal, and did not go on for 10 s"
    pulse.end()
    assert process.wait() == -signal.SIGTERM


def test_who_has_not_begun_is_left_alone(tmp_path: Path) -> None:
    pulse = LivenessProbe(tmp_path / "beat", STOPPED_LOOKS, SILENT_LOOKS, 1.0)
    assert {pulse.look() for _ in range(2 * SILENT_LOOKS)} == {""}
