"""The folder of a job that goes to each of its hosts: documents, and the model's code."""

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from executor.core.hosts import Hosts, read_hosts
from executor.core.job import ComputeMode
from planner.files.plan import read_plan, write_plan
from planner.files.resolved_scenario import read_resolved_scenario, write_resolved_scenario
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError

_CODE = "model.py"
_POLICY = "policy.py"
_VALID = "name the folder 'job' that 'ropebridge deploy' wrote"


@dataclass(frozen=True, slots=True)
class HostedRun:
    """How a job runs.

    Attributes:
        compute: ``real`` or ``paced``.
        steps: Training steps.
        policy: Its name, or a Python file.
        backup_every: Steps between two copies of the state; 0 where a lost host ends the run.
        checkpoint: Folder of the state on disk, which all hosts see; empty for none.
        checkpoint_every: Steps from one to the next.
    """

    compute: ComputeMode
    steps: int
    policy: str
    backup_every: int
    checkpoint: str
    checkpoint_every: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is in the folder.

    Attributes:
        scenario: With the code's path in the folder.
        plan: Of the first step.
        run: How it runs.
        hosts: Where.
    """

    scenario: Scenario
    plan: Plan
    run: HostedRun
    hosts: Hosts

    @property
    def code(self) -> Path | None:
        """The model's file, where it is trained."""
        return self.scenario.code.path if self.scenario.code is not None and self.run.compute == "real" else None

    def write(self, folder: Path) -> None:
        """Write it into a new folder."""
        folder.mkdir(parents=True)
        write_resolved_scenario(self.scenario, folder / "scenario.json")
        write_plan(self.plan, folder / "plan.json")
        (folder / "run.json").write_text(json.dumps(asdict(self.run), indent=1) + "\n")
        self.hosts.write(folder / "hosts.json")
        if self.code is not None:
            shutil.copy(self.code, folder / _CODE)
        if self.run.policy.endswith(".py"):
            shutil.copy(self.run.policy, folder / _POLICY)


def read_bundle(folder: Path) -> Bundle:
    """Return what a folder has.

    Raises:
        InputError: It is not the folder of a job.
    """
    scenario = read_resolved_scenario(folder / "scenario.json")
    try:
        hosts = read_hosts(folder / "hosts.json")
        run = HostedRun(**json.loads((folder / "run.json").read_text()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"this is no job: {error}", where=str(folder), valid=_VALID) from None
    if run.policy.endswith(".py"):
        run = replace(run, policy=str(folder.resolve() / _POLICY))
    if hosts is None:
        raise InputError("this is no job", where=str(folder), valid=_VALID)
    if scenario.code is not None:
        scenario = replace(scenario, code=replace(scenario.code, path=folder.resolve() / _CODE))
    return Bundle(scenario, read_plan(folder / "plan.json"), run, hosts)
