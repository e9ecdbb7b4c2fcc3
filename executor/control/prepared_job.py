"""The folder of a job, with everything that its processes find there when they start."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from executor.core.clock import (
    create_origin,
)
from executor.core.job import JobFolder, RunConfig
from executor.transport.link_shaper import (
    create_ledger,
)
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario


@contextmanager
def prepared_job(scenario: Scenario, plan: Plan, orders: RunConfig) -> Iterator[JobFolder]:
    """Give the folder of a job, for `run_job`; it is gone afterwards, with what the job left there."""
    folder = Path(tempfile.mkdtemp(prefix="ropebridge-"))
    try:
        job = JobFolder(folder)
        job.write(scenario, plan, orders)
        create_ledger(job.ledger, scenario.cluster)
        create_origin(job.origin)
        yield job
    finally:
        shutil.rmtree(folder, ignore_errors=True)
