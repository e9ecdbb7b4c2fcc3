"""How long torchrun takes to go on after a rank is hit: from the hit to the next finished step."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

RANKS = 4
_STEPS = 100_000
_PAUSE_S = 0.002
_WARM_UP_STEPS = 3
_LIMIT_S = 180.0


def restart_s(chance: random.Random, number: signal.Signals) -> float:
    """Train under torchrun, send a signal to a random rank, and return the seconds to the next step that all finish."""
    with TemporaryDirectory(prefix="ropebridge-restart-") as folder:
        place = Path(folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += ["--max-restarts=3", "-m", "experiments.benches.execution.torch_restart", folder, str(_STEPS)]
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        with (place / "log.txt").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _await(place, _WARM_UP_STEPS)
            time.sleep(chance.uniform(0.0, 1.0))
            victim = int((place / f"pid-{chance.randrange(RANKS)}").read_text())
            before = _finished(place)
            killed_s = time.monotonic()
            os.kill(victim, number)
            # What was under way may yet be finished by those whose part does not need the victim: not by all.
            return _await(place, before + 2) - killed_s
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _finished(place: Path) -> int:
    """The latest step that all ranks have finished, -1 if there is none."""
    return min(max((step for step, _ in _lines(place, rank)), default=-1) for rank in range(RANKS))


def _await(place: Path, step: int) -> float:
    """Return when all had finished a step, by the machine's monotonic clock."""
    limit_s = time.monotonic() + _LIMIT_S
    while _finished(place) < step:
        if time.monotonic() > limit_s:
            raise TimeoutError(f"torchrun has not finished step {step}: {(place / 'log.txt').read_text()[-2000:]}")
        time.sleep(_PAUSE_S)
    return max(time_s for rank in range(RANKS) for done, time_s in _lines(place, rank) if done == step)


def _lines(place: Path, rank: int) -> list[tuple[int, float]]:
    path = place / f"steps-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    split = [line.split() for line in lines]
    return [(int(words[0]), float(words[1])) for words in split if len(words) == 2]
