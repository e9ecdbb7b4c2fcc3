"""The folder of a job: what its launcher writes for its workers, and what they leave."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from executor.core.hosts import KEY_FILE
from planner.files.plan import read_plan, write_plan
from planner.files.resolved_scenario import read_resolved_scenario, write_resolved_scenario
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.atomic import write_text_atomically
from traces.common.errors import RunError

ComputeMode = Literal["paced", "real"]
Emulator = Literal["none", "shaper", "relay"]
EmulatorChoice = Literal["none", "shaper", "relay", "auto"]
Tcp = Literal["wide-area", "as-is"]

# Number of the process of its rank that a process is, from 0, in its environment.
INCARNATION = "ROPEBRIDGE_INCARNATION"

# The files of each rank, by kind.
RANK_FILES: Mapping[str, str] = MappingProxyType(
    {
        # Everything that its processes print. Two ranks that end at the same time would mix their lines in one file.
        "log": "rank-{}.log",
        "events": "events-{}.parquet",
        # What its process held at the end of each step, as it comes.
        "resources": "resources-{}.jsonl",
        # Its part of the loss of each step.
        "losses": "losses-{}.json",
        # Its trained parameters, in real compute.
        "parameters": "parameters-{}.safetensors",
        # The norms of gradients: executor/training/noise_scale.py.
        "norms": "gradient-norms-{}.jsonl",
        # Why it gave up.
        "error": "error-{}.json",
    }
)

# What a rank of another host brings to the head at the end; the receiver makes the file's name of it.
FILE_KINDS = ("parameters", "resources", "norms")

_DOCUMENTS = ("scenario", "plan", "config")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How the workers run a job.

    Attributes:
        compute: Whether the model is trained, ``real``, or its bytes are moved at the profile's pace, ``paced``.
        emulator: What emulates the links: nothing; a `LinkShaper` in each process; a relay between namespaces.
        adapts: Whether a policy may change the plan.
        tcp: How the relay's hosts are set: as hosts for wide-area links should be, or as this machine is.
        backup_every: Steps between two copies of the state of all layers, from which a run goes on when ranks are lost;
            0 where such a run ends.
        checkpoints: The folder of the state on disk, from which a run goes on that has ended; empty if there is none.
        checkpoints_mark: A mark by which the ranks know that folder; see `CheckpointFolder.check_held`.
        checkpoint_every: Steps from one checkpoint to the next; 0 writes none.
        spread: Whether the ranks are on several hosts.
        is_watched: Whether each step is shown as soon as it is finished.
        first_step: The first step of the run; where it is not 0, training goes on from the checkpoint of this step.
    """

    compute: ComputeMode
    steps: int
    emulator: Emulator
    adapts: bool
    tcp: Tcp = "wide-area"
    backup_every: int = 0
    checkpoints: str = ""
    checkpoints_mark: str = ""
    checkpoint_every: int = 0
    first_step: int = 0
    spread: bool = False
    is_watched: bool = False

    @property
    def is_steered(self) -> bool:
        """Whether the ranks hear from the launcher while they run."""
        return self.adapts or self.publishes or self.is_watched

    @property
    def publishes(self) -> bool:
        """Whether the launcher hears of all that happens step by step: files of ranks may be lost, or elsewhere."""
        return self.backup_every > 0 or self.spread


class JobFolder:
    """The files of one job.

    Attributes:
        key: The secret of the job, which its owner alone can read: executor/core/control_channel.py.
        origin: Second 0 of the run, for the relay of the emulated links: executor/core/clock.py.
        run_failure: Why the relay could not go on, in one sentence.
        relay_report: What the relay did, written at its end: executor/wan/relay.py.
        published: The rows of all ranks as the launcher was told of them, where files of ranks may be lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key = path / KEY_FILE
        self.hosts = path / "hosts.json"
        self.ledger = path / "links.ledger"
        self.origin = path / "origin"
        self.run_failure = path / "run-failure.txt"
        self.relay_report = path / "relay.json"
        self.log = path / "log.txt"
        self.published = path / "published.parquet"

    def write(self, scenario: Scenario, plan: Plan, config: RunConfig) -> None:
        """Write what the workers read."""
        write_resolved_scenario(scenario, self._document("scenario"))
        write_plan(plan, self._document("plan"))
        self._document("config").write_text(json.dumps(asdict(config)))

    def read(self) -> tuple[Scenario, Plan, RunConfig]:
        """Return what the launcher wrote."""
        config = RunConfig(**json.loads(self._document("config").read_text()))
        return read_resolved_scenario(self._document("scenario")), read_plan(self._document("plan")), config

    def documents(self) -> dict[str, Any]:
        """Return what the workers read, for a folder on another host: a document's name to what it says."""
        return {name: json.loads(self._document(name).read_text()) for name in _DOCUMENTS}

    def write_documents(self, documents: Mapping[str, Any], code: Path | None, checkpoints: str) -> None:
        """Write what the workers of this host read, as its head has sent it.

        What is imported and where files go on this host is not taken from the head.

        Args:
            documents: What `documents` gave on the head.
            code: The model's file on this host; None if it imports none.
            checkpoints: The folder for checkpoints on this host; empty if there is none.

        Raises:
            RunError: The job writes checkpoints, and this host has no folder for them.
        """
        found = {name: dict(documents[name]) for name in _DOCUMENTS}
        if found["scenario"].get("code") is not None:
            missing = self.path / "no-model.py"
            found["scenario"]["code"] = {**found["scenario"]["code"], "path": str(code or missing)}
        if found["config"].get("checkpoints"):
            if not checkpoints:
                raise RunError("the job writes checkpoints, and this host's part of it names no folder for them")
            found["config"]["checkpoints"] = checkpoints
        for name, document in found.items():
            write_text_atomically(self._document(name), json.dumps(document))

    def _document(self, name: str) -> Path:
        return self.path / f"{name}.json"

    def of_rank(self, kind: str, rank: int) -> Path:
        """Return the path of a file of a rank, whose kind is one of `RANK_FILES`."""
        return self.path / RANK_FILES[kind].format(rank)


def rank_devices(scenario: Scenario, plan: Plan, config: RunConfig) -> tuple[str, ...]:
    """Return the devices in rank order: those of the first plan, then those that a later one may have.

    Only between plans whose pipelines wait for each other can layers change devices, so only these need the rest of the
    cluster. On
    several machines the order is the cluster's: what runs where must not change with the plan that a run goes on with.
    """
    devices = [device.name for device in scenario.cluster.devices]
    spare: list[str] = []
    if config.adapts and plan.synchronisation.method == "allreduce":
        spare = [device for device in devices if device not in plan.devices]
    found = (*plan.devices, *spare)
    return tuple(sorted(found, key=devices.index)) if config.spread else found
