"""Compares step times predicted from profiles of this machine (`profile model`, `profile network`) with real ones.

`profile model` measures each example model while a second process computes, as the second rank will; `profile network`
measures the path between two processes. The files that they write are the input of a plan of two stages and of its
simulation. Then two ranks train the model. Medians over several rounds are compared, since the share of the machine
that two processes get changes from moment to moment.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from executor.backend import TorchBackend
from experiments.benches.result import BenchResult, Row, at_most
from experiments.benches.simulation.predicted import EXAMPLE, TrainedCase
from experiments.models import convolutional, digits
from planner.files.scenario import read_scenario
from planner.runs.metrics import measure
from planner.scenario.scenario import ModelCode, Scenario
from sim.simulator import Simulator
from traces.common.atomic import scratch_folder
from traces.common.errors import RunError

ROUNDS = 7
RANKS = 2
SCHEDULE = "1f1b"
CLUSTER, MODEL, SCENARIO = "cluster.yaml", "model.yaml", "scenario.yaml"

_COMMAND = (sys.executable, "-m", "experiments")

# Largest allowed median, over the rounds, of the relative error of the step time.
STEP_ERROR = 0.10

# The models are wide enough that steps consist of compute rather than of messages between two processes.
_wide = partial(TrainedCase, microbatches=8, kind="cpu")
CASES = (
    replace(EXAMPLE, steps=30, kind="cpu"),
    _wide(
        "convolutional",
        ModelCode(Path(convolutional.__file__), {"width": 32, "scales": 3, "side": 32, "classes": 10}),
        samples=4,
        steps=60,
    ),
    _wide("digits", ModelCode(Path(digits.__file__), {"width": 1024, "depth": 6}), samples=128, steps=30),
)


def measure_profile(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Profile, simulate and run each example, with ``quick`` in a single round."""
    rows = [_case(case, 1 if quick else ROUNDS, tell) for case in CASES]
    checks = [at_most(f"step error of {row['case']}", abs(float(row["step_error"])), STEP_ERROR) for row in rows]
    return BenchResult(rows, checks)


def _case(case: TrainedCase, rounds: int, tell: Callable[[str], None]) -> Row:
    predicted, measured = [], []
    for number in range(rounds):
        tell(f"{case.name}, round {number + 1} of {rounds}")
        with scratch_folder() as folder:
            scenario = _profiled(case, folder)
        plan = case.plan(scenario, SCHEDULE)
        predicted.append(measure(Simulator().run(scenario, plan, None, case.steps)).step_s)
        run = TorchBackend("real", emulator="none").run(scenario, plan, None, case.steps)
        measured.append(measure(run).step_s)
        tell(f"{case.name}: {1000 * predicted[-1]:.1f} ms predicted, {1000 * measured[-1]:.1f} ms measured")
    errors = [one / other - 1 for one, other in zip(predicted, measured, strict=True)]
    return {
        "case": case.name,
        "predicted_step_s": median(predicted),
        "measured_step_s": median(measured),
        "step_error": median(errors),
        "least_error": min(errors),
        "most_error": max(errors),
    }


def _profiled(case: TrainedCase, folder: Path) -> Scenario:
    """Profile a model and the network path by the commands; return the scenario that names the files they wrote."""
    settings = [each for key, value in case.code.arguments.items() for each in ("--set", f"{key}={value}")]
    sizes = ["--samples", str(case.samples), "--ranks", str(RANKS), "--kind", case.kind]
    costs = _ropebridge(["profile", "model", str(case.code.path), *settings, *sizes, "-o", str(folder / MODEL)])
    (folder / CLUSTER).write_text(yaml.safe_dump(_devices(case)))
    ends = ",".join(device.region for device in case.scenario.cluster.devices)
    with _listening() as address:
        _ropebridge(["profile", "network", address, "--names", ends, "-o", str(folder / CLUSTER)])
    (folder / SCENARIO).write_text(yaml.safe_dump(_scenario(case, costs["launch_overhead_s"])))
    return read_scenario(folder / SCENARIO)


def _ropebridge(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run([*_COMMAND, *command, "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"'ropebridge {' '.join(command)}' failed: {done.stderr.strip()}")
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@contextmanager
def _listening() -> Iterator[str]:
    """Start a responder for network measurements on this machine, as a context manager that gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    listen = [*_COMMAND, "profile", "network", "--listen", address]
    with subprocess.Popen(listen, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            if address not in (said := process.stderr.readline()):
                raise RunError(f"'profile network --listen {address}' failed: {said.strip()}")
            yield address
        finally:
            process.terminate()


def _devices(case: TrainedCase) -> dict[str, Any]:
    return {
        "kinds": {case.kind: {"peak": "1 TFLOP/s", "memory": "1 TB", "memory_bandwidth": "1 TB/s"}},
        "devices": [
            {"name": each.name, "kind": each.kind, "region": each.region} for each in case.scenario.cluster.devices
        ],
    }


def _scenario(case: TrainedCase, launch_overhead_s: float) -> dict[str, Any]:
    return {
        "name": case.name,
        "cluster": CLUSTER,
        "model": MODEL,
        "training": {"global_batch": case.samples * case.microbatches, "microbatch": case.samples},
        "effects": {"network": "ideal", "compute": {"launch_overhead": f"{launch_overhead_s!r} s"}},
    }
