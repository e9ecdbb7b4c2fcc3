"""A long run holds at its end what it held after its first steps, and leaves nothing behind."""

import math
import os
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from executor.backend import TorchBackend
from executor.core.job import ComputeMode, EmulatorChoice
from executor.rank.telemetry import ResourceSample, read_samples
from executor.wan.testbed import missing
from experiments.benches.processes import MARK, marked_processes
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer
from tests.helpers.processes.process_watch import left_behind, wait_until
from tests.helpers.processes.training import GPT, hybrid_plan, training_scenario
from tests.helpers.scenarios.builders import chain_plan, chain_scenario

pytestmark = pytest.mark.slow

STEPS = 500
# By then everything has been loaded, and every connection has been used.
WARM = 100
WINDOW = 20
MOST_GROWTH = 0.02


def paced() -> tuple[Scenario, Plan]:
    scenario = chain_scenario(
        [0.002, 0.002], [0.004, 0.004], output_bytes=[20_000, 1000], bandwidth_bps=100e6, latency_s=0.002
    )
    return scenario, chain_plan(scenario, microbatches=[2] * 4, depths=[2, 1])


def real() -> tuple[Scenario, Plan]:
    scenario = training_scenario(GPT, 2)
    return scenario, hybrid_plan(scenario, "zb-h1", [([(3, [1.0]), (3, [1.0])], [4, 4, 4])])


def asynchronous() -> tuple[Scenario, Plan]:
    scenario = training_scenario(GPT, 2, optimizer=Optimizer("sgd", 0.05), regions=["north", "south"])
    plan = hybrid_plan(scenario, "1f1b", [([(6, [1.0])], [6]), ([(6, [1.0])], [6])])
    return scenario, replace(plan, synchronisation=Synchronisation("asgd-ga", interval_steps=2, staleness_bound=4))


@pytest.mark.parametrize(
    ("case", "compute", "emulator"),
    [
        pytest.param(paced, "paced", "relay", id="paced-over-emulated-links"),
        pytest.param(real, "real", "none", id="real"),
        pytest.param(asynchronous, "real", "none", id="real-without-waiting"),
    ],
)
def test_five_hundred_steps(
    case: object, compute: ComputeMode, emulator: EmulatorChoice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if emulator == "relay" and (lack := missing()) is not None:
        pytest.skip(lack)
    mark, scratch, resources = uuid.uuid4().hex, tmp_path / "scratch", tmp_path / "resources"
    scratch.mkdir()
    resources.mkdir()
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    interfaces = sorted(os.listdir("/sys/class/net"))
    assert callable(case)
    TorchBackend(compute, emulator=emulator, resources=resources).run(*case(), None, STEPS)
    files = sorted(resources.iterdir())
    assert len(files) == 2
    for file in files:
        assert_steady(read_samples(file), more_threads=0 if case is not asynchronous else 2)
    wait_until(lambda: set(marked_processes(mark)) <= {os.getpid()}, "processes stay behind")
    assert left_behind(tmp_path) == []
    assert sorted(os.listdir("/sys/class/net")) == interfaces


def assert_steady(samples: Sequence[ResourceSample], more_threads: int) -> None:
    assert [sample.step for sample in samples] == list(range(STEPS))
    early, late = samples[WARM : WARM + WINDOW], samples[-WINDOW:]
    growth = median(each.resident_bytes for each in late) / median(each.resident_bytes for each in early) - 1
    counts = [(median(e.open_files for e in part), median(e.threads for e in part)) for part in (early, late)]
    print(f"MEASURED growth {growth:.4%}, files and threads {counts}, {samples[-1]}")
    assert growth < MOST_GROWTH, f"memory grows by {growth:.1%}"
    assert len({each.open_files for each in samples[WARM:]}) == 1
    # A thread that takes in an update posts the next receive before it is free itself: of two that wait on an edge
    # there come to be four.
    assert late[-1].threads - early[0].threads <= more_threads
    assert all(math.isfinite(each.cpu_s) and each.cpu_s > 0 for each in samples)
    assert all(earlier.cpu_s <= later.cpu_s for earlier, later in pairwise(samples))
