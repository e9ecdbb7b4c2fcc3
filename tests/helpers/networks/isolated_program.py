"""A program of the tests that runs between emulated hosts: in namespaces of its own, with a job's folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from executor.core.clock import create_origin
from executor.core.job import JobFolder, RunConfig
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import chain_plan


def run_isolated(program: Path, folder: Path, scenario: Scenario, orders: object, timeout_s: float) -> Any:
    """Return what a program prints, as JSON; its arguments are the job's folder and ``orders``."""
    JobFolder(folder).write(scenario, chain_plan(scenario), RunConfig("paced", 1, "relay", False))
    create_origin(JobFolder(folder).origin)
    isolated = [sys.executable, "-m", "executor.wan.linux", "run", str(os.getpid()), sys.executable]
    done = subprocess.run(
        [*isolated, str(program), str(folder), json.dumps(orders)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
