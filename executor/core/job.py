"""The folder of a job: the documents that the launcher writes for the workers, and the files that the workers write."""

import json
import struct
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

# Environment variable of a rank's process: how many earlier processes of this rank were lost and replaced.
INCARNATION = "ROPEBRIDGE_INCARNATION"

# The name of each rank's file by kind; the placeholder is the number of the rank.
RANK_FILES: Mapping[str, str] = MappingProxyType(
    {
        # All output of the rank's processes. One file for all ranks would mix their lines.
        "log": "rank-{}.log",
        "events": "events-{}.arrows",
        # Memory, processor time, open files and threads of the process at the end of each step.
        "resources": "resources-{}.jsonl",
        # The rank's part of the loss of each step, a line for each.
        "losses": "losses-{}.jsonl",
        # The trained parameters; only with real compute.
        "parameters": "parameters-{}.safetensors",
        # Norms of gradients: executor/training/noise_scale.py.
        "norms": "gradient-norms-{}.jsonl",
        # The name of the device that trained, if it is of another kind than the scenario gives; only with real compute.
        "device": "device-{}.txt",
        # The reason of a failure, a `RankFailure`.
        "error": "error-{}.json",
    }
)

# Kinds of files that a rank of another host sends to the head at the end; the head derives the file name itself.
FILE_KINDS = ("parameters", "resources", "norms", "device")

_STEP = struct.Struct("q")

_DOCUMENTS = ("scenario", "plan", "config")


# The newest two checkpoints may be incomplete, since devices that train together are at most one checkpoint apart, and
# another one may be damaged.
CHECKPOINTS_KEPT = 4


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How the workers run a job.

    Attributes:
        compute: ``real`` trains the model; ``paced`` sleeps for the profile's times and sends messages of the right
            size.
        steps: Number of the step after the last one.
        emulator: How links are emulated: ``none``; ``shaper``, a `LinkShaper` in each process; ``relay``, a process
            between network namespaces.
        adapts: Whether a policy may change the plan.
        measures_links: Whether links that the plan does not use are measured for the policy.
        tcp: TCP settings in the relay's namespaces: tuned for wide-area links, or those of this machine.
        backup_every: Number of steps between two copies of the state of all layers in memory, with which a run survives
            the loss of ranks; 0 makes no copies, so that the loss of a rank ends the run.
        checkpoints: The folder of checkpoints, from which an ended run can be resumed; empty if there is none.
        checkpoints_mark: Content of a file in that folder, by which each rank checks that its folder is the same; see
            `executor.recovery.claim.check_held`.
        checkpoint_every: Number of steps between two checkpoints; 0 writes none.
        checkpoints_kept: Number of the newest checkpoints that are kept.
        attempt: Folder on the head for rows and losses, which outlives the job (executor/control/record/); empty in
            a job without checkpoints, and on other hosts.
        first_step: The first step of the run; if it is not 0, training resumes from the checkpoint of this step.
        first_sample: Samples of all steps before the first step.
        spread: Whether the ranks are on several hosts.
        is_watched: Whether the launcher shows each step as soon as the step is finished.
        on_this_device: Whether real compute may use a device of another kind than the scenario gives.
        at_profile_speed: Whether real compute lasts as long as the profile says, where this device is quicker.
        allows_nan: Whether the run goes on with a loss or parameters that are not finite.
        decoupled: Whether pipelines take steps at their own speed, and processes that are lost are replaced.
        outlives_launcher: Whether ranks go on without their launcher until another one attaches
            (executor/control/attachment.py).
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
    checkpoints_kept: int = CHECKPOINTS_KEPT
    attempt: str = ""
    first_step: int = 0
    first_sample: int = 0
    spread: bool = False
    is_watched: bool = False
    on_this_device: bool = False
    at_profile_speed: bool = False
    allows_nan: bool = False
    decoupled: bool = False
    measures_links: bool = False
    outlives_launcher: bool = False

    @property
    def replaces(self) -> bool:
        """Whether the run survives the loss of ranks, whose processes are replaced."""
        return self.backup_every > 0 or self.decoupled

    @property
    def has_fixed_plan(self) -> bool:
        """Whether ranks know the plan of every step from the start: no policy changes it, and no rank is replaced."""
        return not (self.adapts or self.replaces)

    @property
    def is_steered(self) -> bool:
        """Whether the launcher sends the ranks messages while they run."""
        return self.adapts or self.publishes or self.is_watched

    @property
    def publishes(self) -> bool:
        """Whether ranks send their rows to the launcher, since their files may be lost or on other hosts."""
        return self.replaces or self.spread

    def sees_arrivals(self, plan: Plan) -> bool:
        """Whether a thread waits for each posted receive before an action needs the message.

        Reasons are: a policy, a comparison with the simulator, or emulated links need exact times of arrival;
        asynchronous updates are applied on arrival; and gloo reports the loss of a peer only to a thread that waits for
        a message of that peer.
        """
        is_compared = self.compute == "paced" or self.emulator != "none"
        return self.is_steered or is_compared or plan.synchronisation.method != "allreduce"


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where and how often a run writes checkpoints.

    Attributes:
        first_step: The first step of the run: the step of the checkpoint from which the run resumes, or 0.
        kept: Number of the newest checkpoints that are kept.
    """

    folder: Path
    interval_steps: int
    first_step: int = 0
    kept: int = CHECKPOINTS_KEPT


class JobFolder:
    """The files of one job.

    Attributes:
        key: File of the job's secret key, with mode 0600: executor/core/control_channel.py.
        ledger: File that the `LinkShaper` objects of all ranks share: executor/transport/link_shaper.py.
        origin: File of second 0 of the run, for the relay of the emulated links: executor/core/clock.py.
        run_failure: File of the relay's failure, in one sentence.
        relay_report: File of the relay's report, written at its end: executor/wan/relay.py.
        reached: File of the first step that the launcher has not finished, of a run that may get another launcher.
        published: File of the rows that the ranks sent to the launcher, since files of ranks may be lost; in a job
            without checkpoints.
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
        self.reached = path / "reached"
        self.published = path / "published.arrows"

    def write(self, scenario: Scenario, plan: Plan, config: RunConfig) -> None:
        """Write the documents that the workers read."""
        write_resolved_scenario(scenario, self._document("scenario"))
        write_plan(plan, self._document("plan"))
        self._document("config").write_text(json.dumps(asdict(config)))
        self.reached.write_bytes(_STEP.pack(config.first_step))

    def read(self) -> tuple[Scenario, Plan, RunConfig]:
        """Return the scenario, the plan and the configuration that the launcher wrote."""
        scenario, plan = read_resolved_scenario(self._document("scenario")), read_plan(self._document("plan"))
        return scenario, plan, self.read_config()

    def read_config(self) -> RunConfig:
        """Return the configuration that the launcher wrote."""
        return RunConfig(**json.loads(self._document("config").read_text()))

    def documents(self) -> dict[str, Any]:
        """Return the documents for a folder on another host: a dictionary of names to parsed JSON."""
        return {name: json.loads(self._document(name).read_text()) for name in _DOCUMENTS}

    def write_documents(
        self, documents: Mapping[str, Any], code: Path | None, checkpoints: str, data: Path | None = None
    ) -> None:
        """Write the documents that the head has sent for the workers of this host.

        For security the head decides neither which files this host imports and reads nor where it writes checkpoints.

        Args:
            documents: The result of `documents` on the head.
            code: The model's file or weights on this host; None if this host reads none.
            checkpoints: The folder for checkpoints on this host; empty if there is none.
            data: The data on this host, or its code; None if the scenario names none.

        Raises:
            RunError: The job writes checkpoints, and ``checkpoints`` is empty.
        """
        found = {name: dict(documents[name]) for name in _DOCUMENTS}
        trained = found["scenario"].get("code")
        # A model of transformers with random weights needs no file.
        if trained is not None and trained["path"] is not None:
            missing = self.path / "no-model.py"
            found["scenario"]["code"] = {**trained, "path": str(code or missing)}
        training = found["scenario"]["training"]
        if training.get("data") is not None:
            source = {**training["data"]["source"], "path": str(data or self.path / "no-data")}
            found["scenario"]["training"] = {**training, "data": {**training["data"], "source": source}}
        if found["config"].get("checkpoints"):
            if not checkpoints:
                raise RunError("the job writes checkpoints, but this host's copy of the job names no folder for them")
            found["config"]["checkpoints"] = checkpoints
        found["config"]["attempt"] = ""
        for name, document in found.items():
            write_text_atomically(self._document(name), json.dumps(document))

    def note_reached(self, step: int) -> None:
        """Note the first step that the launcher has not finished; a killed launcher leaves the file whole."""
        with self.reached.open("r+b") as file:
            file.write(_STEP.pack(step))

    def first_unfinished(self) -> int:
        """Return the step that `note_reached` has noted last; without any, the first step of the run."""
        (step,) = _STEP.unpack(self.reached.read_bytes())
        return int(step)

    def last_printed(self) -> str:
        """Return the last lines that the agent of this host or its relay have printed, in one line; or empty."""
        return " | ".join(self.log.read_text(errors="replace").strip().splitlines()[-3:])

    def _document(self, name: str) -> Path:
        return self.path / f"{name}.json"

    def of_rank(self, kind: str, rank: int) -> Path:
        """Return the path of a file of a rank, whose kind is one of `RANK_FILES`."""
        return self.path / RANK_FILES[kind].format(rank)

    def recorded(self, config: RunConfig, kind: str, rank: int) -> Path:
        """Return the path of a rank's events or losses: beside the checkpoints, unless the launcher collects rows."""
        place = Path(config.attempt) if config.attempt and not config.publishes else self.path
        return place / RANK_FILES[kind].format(rank)


def files_of_ranks(folder: Path, kind: str) -> list[Path]:
    """Return the files of one kind of `RANK_FILES` in a folder, in the order of the ranks."""
    before, after = RANK_FILES[kind].split("{}")
    return sorted(
        folder.glob(f"{before}*{after}"), key=lambda path: int(path.name.removeprefix(before).removesuffix(after))
    )


def rank_devices(scenario: Scenario, plan: Plan, config: RunConfig) -> tuple[str, ...]:
    """Return the names of the devices in rank order: those of the first plan, then those that a later plan may use.

    The devices that only take outer steps come last.

    On several machines the order is the cluster's, so that a resumed run, whose plan may be another one, has the same
    rank on each machine.
    """
    devices = [device.name for device in scenario.cluster.devices]
    spare: list[str] = []
    if config.adapts:
        spare = [device for device in devices if device not in plan.devices]
    found = (*plan.devices, *spare, *plan.synchronisation.outer.syncers)
    return tuple(sorted(found, key=devices.index)) if config.spread else found
