"""A job on its way to its hosts: what a target needs to know, kept beside what it has written."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from executor.core.hosts import Hosts, read_hosts
from executor.deploy.hosts_file import HostEntry
from traces.common.errors import InputError

_FILE = "deployment.json"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A job and its hosts.

    Attributes:
        name: The job's: letters, digits and dashes, as batch systems and clouds want it.
        target: What it is brought to its hosts with.
        hosts: Where it runs.
        entries: What is said of each host that takes part.
        environment: Variables for all processes.
        secrets: Names of variables whose values are written nowhere.
        ssh_options: Of ``ssh`` and ``scp``.
        setup: Shell commands for hosts that a cloud has just made.
    """

    name: str
    target: str
    hosts: Hosts
    entries: Mapping[str, HostEntry]
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    ssh_options: tuple[str, ...]
    setup: str

    @property
    def others(self) -> list[str]:
        """The hosts besides the head."""
        return [part.name for part in self.hosts.parts if part.name != self.hosts.head]

    def command(self, host: str, job: str, *, head: str | None = None) -> str:
        """Return the shell command that runs a host's part.

        Args:
            host: Its name.
            job: Path of the job's folder there.
            head: Shell words for the head's address, where it is known only then.
        """
        at = f" --head {head}" if head is not None else ""
        return f"{self.entries[host].command} host {job} {host}{at}"

    def write(self, folder: Path) -> None:
        """Write what `read_deployment` reads."""
        (folder / _FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_deployment(folder: Path) -> Deployment:
    """Return the deployment in a folder.

    Raises:
        InputError: There is none.
    """
    valid = "name a folder that 'ropebridge deploy' wrote"
    try:
        hosts = read_hosts(folder / "job" / "hosts.json")
        data = json.loads((folder / _FILE).read_text())
        entries = TypeAdapter(dict[str, HostEntry]).validate_json(json.dumps(data["entries"]))
        tuples = {key: tuple(data[key]) for key in ("secrets", "ssh_options")}
        assert hosts is not None
        return Deployment(**{**data, **tuples, "hosts": hosts, "entries": entries})
    except FileNotFoundError:
        raise InputError("there is no deployment", where=str(folder), valid=valid) from None
    except (OSError, ValueError, KeyError, TypeError, AssertionError, ValidationError) as error:
        raise InputError(f"this is no deployment: {error}", where=str(folder), valid=valid) from None
