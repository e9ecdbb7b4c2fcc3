"""What one rank knows of its job from the start: its device, and what each plan asks of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from executor.core.clock import RunClock
from executor.core.job import JobFolder, RunConfig, rank_devices
from executor.core.step_program import DeviceProgram, compile_plan, device_program
from executor.rank.handshake import Job
from executor.rank.resources import SampleFile
from executor.recovery.backups import StateBackups
from executor.recovery.checkpoint_writer import Checkpointing
from executor.training.compute import Compute
from executor.training.tensor_parallel import TensorGroup
from executor.transport.link_shaper import LinkShaper
from executor.transport.wire_format import AsItIs, CheckedWire, Compressing, Wire
from planner.events.event import EventWriter
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class RankContext:
    """One process's.

    Attributes:
        compute: Holds the layers.
        clock: Of the run.
        shaper: Emulates links; None where nothing or somebody else does.
        group: With which this rank computes; None where it does by itself.
        file: Takes all rows.
        samples: Takes what the process holds.
        safekeeping: Copies of the state; None where the run ends with the first lost rank.
        checkpointing: Writes the state to disk; None where nobody asks for that.
        note_loss: Takes a step and this rank's part of its loss.
    """

    compute: Compute
    clock: RunClock
    shaper: LinkShaper | None
    group: TensorGroup | None
    file: EventWriter
    samples: SampleFile
    safekeeping: StateBackups | None
    checkpointing: Checkpointing | None
    note_loss: Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class RankConfig:
    """One rank's part.

    Attributes:
        folder: The job's files.
        rank: This one.
        scenario: What is trained.
        plan: Of the first step.
        orders: How the job runs.
        devices: In rank order.
    """

    folder: JobFolder
    rank: int
    scenario: Scenario
    plan: Plan
    orders: RunConfig
    devices: tuple[str, ...]

    @classmethod
    def of(cls, folder: JobFolder, rank: int, given: Job) -> "RankConfig":
        """Return the part of a rank in a job that was read."""
        return cls(folder, rank, *given, rank_devices(*given))

    @property
    def device(self) -> str:
        """This rank's."""
        return self.devices[self.rank]

    @property
    def recovers(self) -> bool:
        """Whether the run goes on when ranks are lost."""
        return self.orders.backup_every > 0

    def program(self, plan: Plan) -> DeviceProgram | None:
        """Return this rank's program under a plan; None if it has none there."""
        if self.device not in plan.devices:
            return None
        program = device_program(plan, self.scenario, self.device)
        if self.orders.compute == "real" or self.leads(plan):
            return program
        # In paced compute the first device of a group spends the time, and moves the bytes, of all of it.
        return replace(program, work=(), synchronisations=(), update_s=0.0)

    def leads(self, plan: Plan) -> bool:
        """Return whether this rank is no partner in a tensor-parallel group of a plan that it has a part in."""
        return self.device in compile_plan(plan, self.scenario)

    def wire(self, plan: Plan) -> Wire:
        """Return how payloads look on the wire under a plan."""
        if self.orders.compute == "paced":
            return AsItIs()
        compression = plan.compression
        return CheckedWire(AsItIs() if compression == "none" else Compressing(compression, self.scenario.cluster))

    @property
    def watches(self) -> bool:
        """Whether arrivals matter that nobody waits for.

        They show a policy, and the rows of emulated links, what links carry; updates are applied on arrival; and of a
        lost peer hears who waits for it.
        """
        updates = self.plan.synchronisation.method != "allreduce"
        return self.orders.is_steered or updates or self.orders.emulator == "relay"
