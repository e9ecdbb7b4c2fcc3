"""What a command that was started under nohup, or in the background of a shell, does about signals."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from experiments.scenarios import READY_FOLDER
from tests.helpers.processes.command import COMMAND


def started_and_signalled(folder: Path, number: signal.Signals, *, ignored: bool) -> subprocess.CompletedProcess[str]:
    """Send a signal to a command that has begun to read its scenario, then let it read the scenario."""
    source = folder / "scenario.yaml"
    os.mkfifo(source)
    disposition = signal.SIG_IGN if ignored else signal.SIG_DFL
    process = subprocess.Popen(
        [*COMMAND, "plan", str(source), "--strategy", "megatron"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, disposition),
    )
    # Opens when the command does: by then it has set its signals.
    with source.open("w") as file:
        process.send_signal(number)
        if ignored:
            text = (READY_FOLDER / "cloud-edge-end-small.yaml").read_text()
            file.write(text.replace("gpt-small.yaml", str(READY_FOLDER / "gpt-small.yaml")))
        else:
            process.wait(timeout=60)
    stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_an_inherited_ignored_signal_stays_ignored(number: signal.Signals, tmp_path: Path) -> None:
    done = started_and_signalled(tmp_path, number, ignored=True)
    assert done.returncode == 0, done.stderr
    assert "one step on steady links" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_another_ends_the_command_with_one_line(number: signal.Signals, tmp_path: Path) -> None:
    done = started_and_signalled(tmp_path, number, ignored=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ropebridge: interrupted\n")
