"""Files are read that have an end, within a bound; a pipe only while somebody writes into it."""

import os
import subprocess
from pathlib import Path

import pytest

from traces.common.errors import InputError
from traces.common.text import read_regular


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # The writer comes late, and writes more than fits into a pipe.
    with subprocess.Popen(["sh", "-c", f"sleep 0.2; head -c 300000 /dev/zero > {pipe}"]):
        assert read_regular(pipe) == bytes(300_000)
    with subprocess.Popen(["sh", "-c", f"head -c 300000 /dev/zero > {pipe}"]) as writer:
        with pytest.raises(InputError, match="has more than"):
            read_regular(pipe, 100_000)
        writer.kill()


def test_a_shell_can_give_the_output_of_a_command(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(b"text")
    assert read_regular(Path(f"/dev/fd/{reader}")) == b"text"
    os.close(reader)


def test_a_pipe_into_which_nobody_writes_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is a pipe into which nobody writes"):
        read_regular(tmp_path / "pipe")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev/tty"])
def test_devices_are_not_read(path: str) -> None:
    with pytest.raises(InputError, match="is a device or socket"):
        read_regular(Path(path))


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match="has more than"):
        read_regular(tmp_path / "sparse")
