"""Signals to ranks in the middle of a run."""

import os
import signal
import time
from pathlib import Path

from executor.core.liveness import beat_path
from executor.rank.telemetry import read_samples


def strike(folder: Path, rank: int, step: int, number: signal.Signals) -> None:
    """Send a signal to the process of a rank when it has done a step."""
    job = await_step(folder, rank, step)
    os.kill(int(beat_path(job, rank).read_text()), number)


def await_step(folder: Path, rank: int, step: int) -> Path:
    """The folder of the job that has its place in ``folder``, once a rank has done a step."""
    while True:
        for job in folder.glob("ropebridge-*"):
            samples = job / f"resources-{rank}.jsonl"
            if samples.exists() and any(each.step >= step for each in read_samples(samples)):
                return job
        time.sleep(0.002)
