"""Work that no machine has memory or time for, and what the operating system refuses: one line, exit status 2 or 1."""

import errno
from pathlib import Path

import pytest

import experiments.cli.app
from tests.experiments.cli.test_bad_input import assert_refused, write
from tests.helpers.processes.command import ropebridge


@pytest.mark.parametrize("limit", [("--steps", "999999999"), ("--duration", "99999999 h")])
def test_a_simulation_of_more_events_than_the_disk_may_hold_is_refused(limit: tuple[str, str], tmp_path: Path) -> None:
    command = ["simulate", write(tmp_path), "--strategy=megatron", *limit, "-o", tmp_path / "run"]
    assert_refused(command, tmp_path, "24 actions and messages make", "100,000,000", "4,166,666 steps or fewer")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (MemoryError("Unable to allocate 3 GiB"), 1, "the memory does not suffice: Unable to allocate 3 GiB"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), 2, "a/b cannot be used: Permission denied; check"),
        (OSError(errno.EMFILE, "Too many open files"), 1, "the operating system refuses: Too many open files"),
    ],
)
def test_what_the_system_refuses_is_told_in_one_line(
    error: Exception, status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(standalone_mode: bool) -> None:
        raise error

    monkeypatch.setattr(experiments.cli.app, "app", refuse)
    done = ropebridge("traces")
    assert (done.returncode, len(done.stderr.splitlines())) == (status, 1)
    assert done.stderr.startswith(f"ropebridge: {said}")


def test_wrong_timeouts_are_refused_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEBRIDGE_TIMEOUTS", '{"recv": 1}')
    command = ["run", write(tmp_path), "--strategy=megatron", "--compute=paced", "-o", tmp_path / "run"]
    assert_refused(command, tmp_path, "the environment variable ROPEBRIDGE_TIMEOUTS", "did you mean 'recv_s'")
