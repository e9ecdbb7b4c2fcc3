"""A job that is deployed to hosts: the folder ``job`` that is copied to each host, and the data that targets need."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from executor.core.hosts import Hosts, read_hosts
from executor.core.job import ComputeMode
from executor.deploy.gpus import Gpus
from executor.deploy.hosts_file import HostEntry
from planner.files.plan import read_plan, write_plan
from planner.files.resolved_scenario import read_resolved_scenario, write_resolved_scenario
from planner.plan.plan import Plan
from planner.scenario.data import DatasetCode
from planner.scenario.scenario import Code, HuggingFaceCode, Scenario, weight_files
from traces.common.errors import InputError

# The model's file, or its weights: a file or a folder.
_CODE, _WEIGHTS = "model.py", "weights"
_DATASET = "dataset.py"
_POLICY = "policy.py"
_FILE = "deployment.json"


@dataclass(frozen=True, slots=True)
class HostedRun:
    """How a job runs on its hosts, as options of the command.

    Attributes:
        compute: ``real`` trains the model; ``paced`` sleeps for the profile's times and sends messages of the right
            size.
        policy: Name of the policy, or path of a Python file that defines a policy.
        backup_every: Number of steps between two copies of the state in memory; 0 if a lost host ends the run.
        checkpoint: Folder for checkpoints, which all hosts can access; empty for none.
        on_this_device: Whether hosts may train on devices of other kinds than the scenario gives.
    """

    compute: ComputeMode
    steps: int
    policy: str
    backup_every: int
    checkpoint: str
    checkpoint_every: int
    on_this_device: bool = False


@dataclass(frozen=True, slots=True)
class Bundle:
    """The contents of the job's folder, which also has the code of model, data set and policy; each host gets a copy.

    Folders of data are not copied: they must be at the path that the scenario names, on every host.
    """

    scenario: Scenario
    plan: Plan
    run: HostedRun
    hosts: Hosts

    @property
    def code(self) -> Path | None:
        """Path of the model's file or weights; None for paced compute, and for random weights."""
        return self.scenario.code.path if self.scenario.code is not None and self.run.compute == "real" else None

    @property
    def data(self) -> Path | None:
        """Path of the data, or of its code; None for paced compute, and for a model with its own data."""
        data = self.scenario.training.data
        return data.source.path if data is not None and self.run.compute == "real" else None

    @property
    def checkpoints(self) -> str:
        """Absolute path of the folder for checkpoints on this host; empty if the job writes none."""
        return str(Path(self.run.checkpoint).resolve()) if self.run.checkpoint else ""

    def write(self, folder: Path) -> None:
        """Write the job into a new folder."""
        folder.mkdir(parents=True)
        write_resolved_scenario(self.scenario, folder / "scenario.json")
        write_plan(self.plan, folder / "plan.json")
        (folder / "run.json").write_text(json.dumps(asdict(self.run), indent=1) + "\n")
        self.hosts.write(folder / "hosts.json")
        if self.code is not None:
            _copy(self.code, folder / _place(self.scenario.code))
        if self.data is not None and self.data.suffix == ".py":
            shutil.copy(self.data, folder / _DATASET)
        if self.run.policy.endswith(".py"):
            shutil.copy(self.run.policy, folder / _POLICY)


def read_bundle(folder: Path) -> Bundle:
    """Return the job in a folder; raise `InputError` if the folder contains no job."""
    scenario = read_resolved_scenario(folder / "scenario.json")
    try:
        run = HostedRun(**json.loads((folder / "run.json").read_text()))
        hosts = _read_hosts(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        valid = "name the folder 'job' that 'ropebridge deploy' wrote"
        raise InputError(f"the folder does not hold a job: {error}", where=str(folder), valid=valid) from None
    if run.policy.endswith(".py"):
        run = replace(run, policy=str(folder.resolve() / _POLICY))
    if scenario.code is not None and scenario.code.path is not None:
        place = folder.resolve() / _place(scenario.code)
        scenario = replace(scenario, code=replace(scenario.code, path=place))
    training = scenario.training
    if training.data is not None and isinstance(training.data.source, DatasetCode):
        code = replace(training.data.source, path=folder.resolve() / _DATASET)
        scenario = replace(scenario, training=replace(training, data=replace(training.data, source=code)))
    return Bundle(scenario, read_plan(folder / "plan.json"), run, hosts)


def _place(code: Code | None) -> str:
    return _WEIGHTS if isinstance(code, HuggingFaceCode) else _CODE


def _copy(source: Path, target: Path) -> None:
    if not source.is_dir():
        shutil.copy(source, target)
        return
    target.mkdir()
    for file in weight_files(source):
        shutil.copy(file, target)


def _read_hosts(folder: Path) -> Hosts:
    hosts = read_hosts(folder / "hosts.json")
    if hosts is None:
        raise ValueError("hosts.json is missing")
    return hosts


@dataclass(frozen=True, slots=True)
class Deployment:
    """The data that a target needs to bring a job to its hosts.

    Attributes:
        name: Name of the job: lower-case letters, digits and dashes, as batch systems and clouds require.
        target: Name of the target, as in ``--target``.
        entries: The entry of each host of the job in the hosts file.
        environment: Environment variables of the job on each host.
        secrets: Names of environment variables whose values are not written to any file.
        ssh_options: Additional options of ``ssh`` and ``scp``.
        setup: Shell commands that prepare hosts which a cloud has just created.
        gpus: The GPUs of each host.
    """

    name: str
    target: str
    hosts: Hosts
    entries: Mapping[str, HostEntry]
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    ssh_options: tuple[str, ...]
    setup: str
    gpus: Gpus = field(default_factory=Gpus)

    def command(self, host: str, job: str, *, head: str | None = None) -> str:
        """Return the shell command that runs a host's part of the job.

        ``job`` is the path of the job's folder there; ``head`` is the head's address if the folder does not contain it.
        """
        option = f" --head {head}" if head is not None else ""
        return f"{self.entries[host].command} host {job} {host}{option}"

    def write(self, folder: Path) -> None:
        """Write ``deployment.json``, which `read_deployment` reads."""
        data = asdict(self)
        # The hosts are in the job's folder, together with the job's key.
        del data["hosts"]
        (folder / _FILE).write_text(json.dumps(data, indent=1) + "\n")


def read_deployment(folder: Path) -> Deployment:
    """Return the deployment in a folder; raise `InputError` if the folder contains no valid one."""
    valid = "name a folder that 'ropebridge deploy' wrote"
    try:
        data = json.loads((folder / _FILE).read_text())
        entries = TypeAdapter(dict[str, HostEntry]).validate_json(json.dumps(data["entries"]))
        tuples = {key: tuple(data[key]) for key in ("secrets", "ssh_options")}
        gpus = Gpus(**data.get("gpus", {}))
        return Deployment(**{**data, **tuples, "hosts": _read_hosts(folder / "job"), "entries": entries, "gpus": gpus})
    except FileNotFoundError:
        raise InputError("there is no deployment", where=str(folder), valid=valid) from None
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise InputError(f"the deployment cannot be read: {error}", where=str(folder), valid=valid) from None
