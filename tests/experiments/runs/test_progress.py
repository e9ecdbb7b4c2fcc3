"""A run that is looked at while it goes on: through a terminal, TensorBoard's files, and Prometheus' questions."""

import os
import pty
import re
import socket
import subprocess
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from experiments.runs.progress import run_lines, sparkline
from planner.runs.record import Progress
from tests.helpers.processes.command import COMMAND, ropebridge, ropebridge_process

RUN = ("run", "two-regions", "--strategy=megatron", "--compute", "paced", "--policy", "depth")


def test_lines_are_few_and_decisions_are_never_left_out() -> None:
    lines: list[str] = []
    watch = run_lines(lines.append)
    for step in range(1000):
        watch(Progress(step, 1000, 0.01 * step, 0.01, 8, 0.5, "depth" if step == 500 else "", ()))
    assert [line for line in lines if "decided" in line] == [lines[1]]
    assert lines[-1].startswith("step 1000 of 1000: 0.01 s, 800 samples/s, loss 0.5")
    assert len(lines) == 3


def test_bars_are_as_high_as_their_values() -> None:
    assert sparkline([0.0, 1.0, 2.0]) == " ▄█"
    assert sparkline([0.0]) == " "


def test_a_run_is_shown_in_a_terminal() -> None:
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def look() -> None:
        with suppress(OSError):
            while part := os.read(ours, 1 << 16):
                shown.append(part)

    looking = threading.Thread(target=look)
    looking.start()
    with open(theirs, "w") as terminal:
        done = ropebridge(*RUN, "--steps", 4, "--live", terminal=terminal)
    looking.join()
    os.close(ours)
    assert done.returncode == 0
    assert "step 4 of 4" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(shown).decode())


@pytest.mark.slow
def test_other_tools_can_watch(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("tensorboard")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sinks = ("--prometheus", f"127.0.0.1:{port}", "--tensorboard", str(tmp_path / "board"), "--live")
    with subprocess.Popen([*COMMAND, *RUN, "--steps", "6", *sinks], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen = ""
        for line in process.stderr:
            if re.search(r"step \d+ of 6", line):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    seen = answer.read().decode()
                break
        assert process.wait(60) == 0
    assert re.search(r"ropebridge_steps_total [1-9]", seen)
    assert re.search(r"ropebridge_samples_per_second [1-9]", seen)
    assert [path.stat().st_size > 0 for path in (tmp_path / "board").iterdir()] == [True]


def test_a_run_that_is_refused_leaves_no_board(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board = tmp_path / "some" / "board"
    refused = ("run", "two-regions", "--strategy=megatron", "--compute", "paced", "--policy", "none.py", "--steps", 1)
    assert ropebridge(*refused, "--tensorboard", board).returncode == 2
    assert list(tmp_path.iterdir()) == []
    board.mkdir(parents=True)
    (board / "kept").touch()
    assert ropebridge(*refused, "--tensorboard", board).returncode == 2
    assert list(board.iterdir()) == [board / "kept"]


def test_an_address_that_is_none_is_refused() -> None:
    pytest.importorskip("prometheus_client")
    done = ropebridge(*RUN, "--prometheus", "nowhere")
    assert done.returncode == 2
    assert "--prometheus" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_the_first_command_says_that_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "compiled"))
    first, later = (ropebridge_process("plan", "two-regions", "-o", tmp_path / f"{each}.json") for each in (1, 2))
    assert (first.returncode, later.returncode) == (0, 0)
    assert first.stderr.count("compiling the planner and the simulator") == 1
    assert "compiling" not in later.stderr
    assert first.stdout == later.stdout
