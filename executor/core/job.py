"""What a launcher hands its workers, and they hand back: files in one folder."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from planner.files.plan import read_plan, write_plan
from planner.files.resolved_scenario import read_resolved_scenario, write_resolved_scenario
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario

ComputeMode = Literal["paced", "real"]
Emulator = Literal["none", "shaper", "relay"]
EmulatorChoice = Literal["none", "shaper", "relay", "auto"]
Tcp = Literal["wide-area", "as-is"]

# Which process of its rank a process is, from 0.
INCARNATION = "ROPEBRIDGE_INCARNATION"

_DOCUMENTS = ("scenario.json", "plan.json", "orders.json")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How the workers run a job.

    Attributes:
        compute: ``paced`` or ``real``.
        steps: Training steps.
        emulator: What emulates the links: nothing; a `LinkShaper` in each process; a relay between namespaces.
        adapts: Whether a policy may change the plan.
        tcp: How the relay's hosts are set: as hosts for wide-area links should be, or as this machine is.
        backup_every: Steps between two copies of the state of all layers, from which a run goes on when ranks are lost;
            0 where such a run ends.
        checkpoints: The folder of the state on disk, from which a run goes on that has ended; empty if there is none.
        checkpoints_mark: By which the ranks know that folder; see `CheckpointFolder.check_held`.
        checkpoint_every: Steps between two of them; 0 writes none.
        spread: Whether its ranks are on several machines.
        is_watched: Whether somebody looks at the run while it goes on.
        first_step: Of the run; where it is not 0, training goes on from the checkpoint of this step.
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
    """The files of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, scenario: Scenario, plan: Plan, orders: RunConfig) -> None:
        """Write what the workers read."""
        write_resolved_scenario(scenario, self.path / "scenario.json")
        write_plan(plan, self.path / "plan.json")
        (self.path / "orders.json").write_text(json.dumps(asdict(orders)))

    def read(self) -> tuple[Scenario, Plan, RunConfig]:
        """Return what the launcher wrote."""
        orders = RunConfig(**json.loads((self.path / "orders.json").read_text()))
        scenario = read_resolved_scenario(self.path / "scenario.json")
        return scenario, read_plan(self.path / "plan.json"), orders

    def documents(self) -> dict[str, Any]:
        """Return what the workers read, for a folder on another machine: the file's name to what it says."""
        return {name: json.loads((self.path / name).read_text()) for name in _DOCUMENTS}

    @property
    def hosts(self) -> Path:
        """The hosts of a job on several machines: executor/core/hosts.py."""
        return self.path / "hosts.json"

    def left(self, rank: int) -> list[Path]:
        """Return the files that a rank may leave at its end, besides what it publishes."""
        return [self.parameters(rank), self.resources(rank), self.norms(rank)]

    @property
    def ledger(self) -> Path:
        """The shared ledger of emulated links."""
        return self.path / "links.ledger"

    @property
    def origin(self) -> Path:
        """Second 0 of the run, for who has to know it outside the ranks: executor/core/clock.py."""
        return self.path / "origin"

    @property
    def failure(self) -> Path:
        """Written by the agent when a rank failed."""
        return self.path / "failure.json"

    @property
    def run_failure(self) -> Path:
        """Why the run cannot go on though no rank has failed, in one sentence."""
        return self.path / "run-failure.txt"

    @property
    def relay_report(self) -> Path:
        """What the relay of the emulated links did, written at its end: executor/wan/report.py."""
        return self.path / "relay.json"

    @property
    def log(self) -> Path:
        """Everything that the agent prints."""
        return self.path / "log.txt"

    @property
    def workers_logs(self) -> Path:
        """The folder for what workers print.

        Each has a file of its own: two that end at the same time would mix their lines.
        """
        return self.path / "workers-logs"

    def events(self, rank: int) -> Path:
        """A rank's events, written at the end."""
        return self.path / f"events-{rank}.parquet"

    @property
    def published(self) -> Path:
        """The rows of all ranks as the launcher was told of them, of a run that goes on when ranks are lost."""
        return self.path / "published.parquet"

    def resources(self, rank: int) -> Path:
        """What a rank's process held at the end of each step, as it comes."""
        return self.path / f"resources-{rank}.jsonl"

    def losses(self, rank: int) -> Path:
        """A rank's part of the loss of each step, written at the end."""
        return self.path / f"losses-{rank}.json"

    def parameters(self, rank: int) -> Path:
        """A rank's trained parameters, written at the end of real compute."""
        return self.path / f"parameters-{rank}.safetensors"

    def norms(self, rank: int) -> Path:
        """The norms of gradients that a rank has noted: executor/training/noise_scale.py."""
        return self.path / f"gradient-norms-{rank}.jsonl"

    def error(self, rank: int) -> Path:
        """Why a rank gave up."""
        return self.path / f"error-{rank}.json"


def rank_devices(scenario: Scenario, plan: Plan, orders: RunConfig) -> tuple[str, ...]:
    """Return the devices in rank order: those of the first plan, then those that a later one may take up.

    Only plans whose pipelines wait for each other can be set up anew, so only these need the rest of the cluster. On
    several machines the order is the cluster's: what runs where must not change with the plan that a run goes on with.
    """
    devices = [device.name for device in scenario.cluster.devices]
    spare: list[str] = []
    if orders.adapts and plan.synchronisation.method == "allreduce":
        spare = [device for device in devices if device not in plan.devices]
    found = (*plan.devices, *spare)
    return tuple(sorted(found, key=devices.index)) if orders.spread else found
