"""A job that is deployed to hosts: the folder ``job`` that is copied to each host, and the data that targets need."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from executor.core.hosts import Hosts, read_hosts
from executor.deploy.bundle import RunBundle, read_run_bundle
from executor.deploy.gpus import Gpus
from executor.deploy.hosts_file import HostEntry
from planner.files.documents import read_json
from traces.common.atomic import write_private_text
from traces.common.errors import InputError

_FILE = "deployment.json"


@dataclass(frozen=True, slots=True)
class Bundle(RunBundle):
    """The contents of the job's folder, of which each host gets a copy: the run, and all hosts of the job."""

    hosts: Hosts

    @property
    def checkpoints(self) -> str:
        """Absolute path of the folder for checkpoints on this host; empty if the job writes none."""
        return str(Path(self.run.checkpoint).resolve()) if self.run.checkpoint else ""

    def write(self, folder: Path) -> None:
        """Write the job into a new folder."""
        RunBundle.write(self, folder)
        self.hosts.write(folder / "hosts.json")


def read_bundle(folder: Path) -> Bundle:
    """Return the job in a folder; raise `InputError` if the folder contains no job."""
    found = read_run_bundle(folder)
    try:
        hosts = _read_hosts(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        valid = "name the folder 'job' that 'ropebridge deploy' wrote"
        raise InputError(f"the folder does not hold a job: {error}", where=str(folder), valid=valid) from None
    return Bundle(found.scenario, found.plan, found.run, hosts)


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
        write_private_text(folder / _FILE, json.dumps(data, indent=1) + "\n")


def read_deployment(folder: Path) -> Deployment:
    """Return the deployment in a folder; raise `InputError` if the folder contains no valid one."""
    valid = "name a folder that 'ropebridge deploy' wrote"
    try:
        data = read_json(folder / _FILE)
        entries = TypeAdapter(dict[str, HostEntry]).validate_json(json.dumps(data["entries"]))
        tuples = {key: tuple(data[key]) for key in ("secrets", "ssh_options")}
        gpus = Gpus(**data.get("gpus", {}))
        return Deployment(**{**data, **tuples, "hosts": _read_hosts(folder / "job"), "entries": entries, "gpus": gpus})
    except FileNotFoundError:
        raise InputError("there is no deployment", where=str(folder), valid=valid) from None
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise InputError(f"the deployment cannot be read: {error}", where=str(folder), valid=valid) from None
