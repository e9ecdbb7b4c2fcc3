import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from traces.common.atomic import scratch_folder, write_bytes_atomically, write_text_atomically, written_together
from traces.common.errors import InputError, RunError


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text_atomically(path, "old and long")
    write_text_atomically(path, "µ\n")
    assert path.read_bytes() == "µ\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    write_bytes_atomically(path, b"old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="cannot be written: No space left on device; make room"):
        write_bytes_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder; name a file"):
        write_text_atomically(tmp_path, "")
    with pytest.raises(InputError, match=r"the folder '.*none' does not exist; create it first"):
        write_text_atomically(tmp_path / "none" / "file", "")
    with pytest.raises(InputError, match="cannot be written: File name too long"):
        write_text_atomically(tmp_path / ("x" * 300), "")
    write_text_atomically(tmp_path / ("x" * 254), "long, and allowed")
    assert (tmp_path / ("x" * 254)).read_text() == "long, and allowed"


def test_several_files_appear_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with written_together():
        write_text_atomically(first, "1")
        write_text_atomically(second, "2")
        assert not first.exists()
        assert not second.exists()
    assert (first.read_text(), second.read_text()) == ("1", "2")

    def write_both(then: BaseException | None = None) -> None:
        with written_together():
            write_text_atomically(first, "3")
            monkeypatch.setattr("os.fsync", full)
            if then is not None:
                raise then
            write_text_atomically(second, "4")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    for then, raised in ((None, RunError), (KeyboardInterrupt(), KeyboardInterrupt)):
        with pytest.raises(raised):
            write_both(then)
        monkeypatch.undo()
        assert (first.read_text(), second.read_text()) == ("1", "2")
        assert sorted(tmp_path.iterdir()) == [first, second]


def test_what_a_killed_process_has_left_goes_and_what_others_have_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = "import os, tempfile\nfrom traces.common.atomic import scratch_folder\nwith scratch_folder(): os._exit(1)"
    subprocess.run([sys.executable, "-c", killed], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    (left,) = tmp_path.iterdir()
    _, process, start, random = left.name.split("-")
    # The number of a living process, which is another one; a name that nobody of ours has given; another's folder.
    again = left.rename(tmp_path / f"ropebridge-{os.getpid()}-{start}-{random}")
    strange, locked = tmp_path / "ropebridge-bench-1", tmp_path / f"ropebridge-{process}-{start}-00000000"
    strange.mkdir()
    locked.mkdir()
    (tmp_path / f"ropebridge-{process}-{start}-11111111").symlink_to(strange)
    holding = os.open(locked, os.O_RDONLY)
    fcntl.flock(holding, fcntl.LOCK_EX)
    with scratch_folder() as own, scratch_folder() as other:
        assert not again.exists()
        assert own.exists()
        assert stat.S_IMODE(other.stat().st_mode) == 0o700
    os.close(holding)
    assert len(list(tmp_path.iterdir())) == 3
    with scratch_folder():
        assert not locked.exists()
    assert strange.exists()
