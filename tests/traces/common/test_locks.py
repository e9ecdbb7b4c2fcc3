"""Locks on files keep other holders out, also where one of them removes the file meanwhile."""

import fcntl
from pathlib import Path
from typing import IO

import pytest

from traces.common.locks import lock_file


def test_a_lock_on_a_file_that_another_holder_has_removed_meanwhile_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "lock", fcntl.flock
    removed: list[Path] = []

    def late_flock(file: IO[bytes], operation: int) -> None:
        if not removed:
            removed.append(path)
            path.unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late_flock)
    with lock_file(path), pytest.raises(BlockingIOError):
        lock_file(path)


def test_who_may_wait_is_told_and_gets_the_lock_when_it_is_free(tmp_path: Path) -> None:
    held = lock_file(tmp_path / "lock")
    with lock_file(tmp_path / "lock", waiting=held.close):
        assert held.closed
