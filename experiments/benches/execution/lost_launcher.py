"""Measures the recovery from a killed launcher: all processes of the run end, and the run resumes from a checkpoint.

The launcher is ``python -m experiments.benches.execution.lost_launcher FOLDER STEPS``. After the kill it is started
again at once, as a supervisor of the command would do with ``--resume``.
"""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from executor.backend import TorchBackend
from executor.core.job import CheckpointConfig
from executor.recovery.checkpoints import CheckpointFolder
from executor.recovery.claim import resumption
from experiments.benches.cases import STAGES, recovery_case
from experiments.benches.execution.torch_restart import WARM_UP_STEPS, await_step
from traces.common.atomic import scratch_folder

_LIMIT_S = 120.0


def main(folder: str, steps: str) -> None:
    """Train from the newest checkpoint in a folder, or from the beginning; write losses and parameters there."""
    place = Path(folder)
    scenario, plan = recovery_case()
    first = 0
    if _newest(place) >= 0:
        first, plan = resumption(place / "checkpoints", scenario, int(steps), print)
    backend = TorchBackend(
        "real",
        parameters=place / "parameters.safetensors",
        backup_every=1,
        checkpoints=CheckpointConfig(place / "checkpoints", 1, first),
    )
    record = backend.run(scenario, plan, None, int(steps))
    (place / "losses.json").write_text(json.dumps(dict(enumerate(record.losses, first))))


def resumption_s(chance: random.Random, steps: int) -> tuple[float, dict[int, float], dict[str, torch.Tensor]]:
    """Kill a launcher at a random instant of a run of ``steps`` steps, and start it again.

    Returns:
        Seconds from the kill to the checkpoint of the first step that had not been finished before the kill; the loss
        of each step after the resumption; the final parameters by name.
    """
    with scratch_folder() as place:
        first = _start(place, steps)
        try:
            await_step(_newest, place, WARM_UP_STEPS, _LIMIT_S)
            time.sleep(chance.uniform(0.0, 0.5))
        finally:
            first.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        first.wait()
        before = _newest(place)
        second = _start(place, steps)
        try:
            # Ranks outlive their launcher by a moment, and may still finish their part of a checkpoint.
            await_step(_newest, place, before + 2, _LIMIT_S)
            took_s = time.monotonic() - killed_s
            if second.wait(_LIMIT_S):
                raise RuntimeError(f"the resumed run ended with status {second.returncode}")
        finally:
            second.kill()
            second.wait()
        losses = json.loads((place / "losses.json").read_text())
        return took_s, {int(step): loss for step, loss in losses.items()}, load_file(place / "parameters.safetensors")


def _start(place: Path, steps: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "experiments.benches.execution.lost_launcher", str(place), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _newest(place: Path) -> int:
    """Return the latest step for which every stage has written a checkpoint; -1 if there is none."""
    folder = CheckpointFolder(place / "checkpoints")
    return max((step for step in folder.steps if len(folder.parts(step)) == STAGES), default=-1)


if __name__ == "__main__":
    main(*sys.argv[1:])
