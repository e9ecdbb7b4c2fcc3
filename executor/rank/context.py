"""What one rank knows of its job from the start, and what its process holds over all sessions."""

import gc
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from executor.core.clock import RunClock
from executor.core.job import JobFolder, RunConfig
from executor.core.step_program import DeviceProgram, compile_plan, device_program
from executor.core.timeouts import timeouts
from executor.rank.telemetry import SampleFile
from executor.recovery.backups import StateBackups, first_state, layers_of, one_layer
from executor.recovery.checkpoint_writer import Checkpointing
from executor.training.compute import PacedCompute
from executor.training.device import compute_device
from executor.training.flat_state import model_state
from executor.training.models.loading import LoadedModel
from executor.training.noise_scale import NoiseMeasuringCompute
from executor.training.real_compute import Compute, RealCompute
from executor.training.tensor_parallel import TensorGroup, form_group
from executor.transport.link_shaper import LinkShaper
from executor.transport.wire_format import CompressedWire, UncheckedWire, Wire
from planner.events.event import EventWriter
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class RankConfig:
    """One rank's part in a job.

    Attributes:
        devices: The names of the devices in rank order.
    """

    folder: JobFolder
    rank: int
    scenario: Scenario
    plan: Plan
    run: RunConfig
    devices: tuple[str, ...]

    @property
    def device(self) -> str:
        """The name of this rank's device."""
        return self.devices[self.rank]

    @property
    def recovers(self) -> bool:
        """Whether the run goes on when ranks are lost."""
        return self.run.backup_every > 0

    def program(self, plan: Plan) -> DeviceProgram | None:
        """Return this rank's program under a plan; None if it has none there."""
        if self.device not in plan.devices:
            return None
        program = device_program(plan, self.scenario, self.device)
        if self.run.compute == "real" or self.leads(plan):
            return program
        # In paced compute the first device of a group spends the time, and moves the bytes, of all of it.
        return replace(program, work=(), synchronisations=(), update_s=0.0)

    def leads(self, plan: Plan) -> bool:
        """Return whether this rank is no partner in a tensor-parallel group of a plan that it has a part in."""
        return self.device in compile_plan(plan, self.scenario)

    def wire(self, plan: Plan) -> Wire:
        """Return how payloads look on the wire under a plan."""
        if self.run.compute == "paced":
            return UncheckedWire()
        return CompressedWire(plan.compression, self.scenario.cluster)

    @property
    def watches(self) -> bool:
        """Whether arrivals matter that nobody waits for.

        They show a policy, and the rows of emulated links, what links carry; updates are applied on arrival; and of a
        lost peer hears who waits for it.
        """
        updates = self.plan.synchronisation.method != "allreduce"
        return self.run.is_steered or updates or self.run.emulator == "relay"


@dataclass(frozen=True, slots=True)
class RankContext:
    """What the process of a rank holds over all sessions.

    Attributes:
        shaper: Emulator of the links; None where nothing or the relay does.
        group: The tensor-parallel group of this rank; None where it computes by itself.
        samples: Takes the resources of the process at the end of each step.
        backups: Copies of the state; None where the run ends with the first lost rank.
        checkpoints: Writes the state to disk; None where nobody asks for that.
        loss_steps: The steps that have a part of their loss here; sixteen bytes a step together with these.
    """

    compute: Compute
    clock: RunClock
    shaper: LinkShaper | None
    group: TensorGroup | None
    file: EventWriter
    samples: SampleFile
    backups: StateBackups | None
    checkpoints: Checkpointing | None
    loss_steps: "array[int]"
    losses: "array[float]"

    @property
    def trained(self) -> RealCompute | None:
        """The model that is trained; None in paced compute."""
        return self.compute if isinstance(self.compute, RealCompute) else None


def build_context(
    config: RankConfig, model: LoadedModel | None, give_up: Callable[[Exception], None], *, is_connected: bool
) -> RankContext:
    """Return what this process holds; its clock has yet to be started.

    Args:
        config: The rank's part in the job.
        model: The model that is trained; None in paced compute.
        give_up: Called in another thread with an error that ends this process.
        is_connected: Whether the ranks of the job are connected, so that they can form tensor-parallel groups.
    """
    scenario, run, training = config.scenario, config.run, config.scenario.training
    where = compute_device(scenario.cluster.by_name[config.device].kind, run.compute)
    group = None
    if model is not None and is_connected:
        group = form_group(config.plan, config.device, timedelta(seconds=timeouts().recv_s))
    clock = RunClock()
    compute: Compute = PacedCompute(clock)
    if model is not None:
        kind = NoiseMeasuringCompute if training.noise_scale else RealCompute
        compute = kind(model, config.plan, config.program(config.plan), training, clock, where, group)
    shaper = LinkShaper(config.folder.ledger, scenario.cluster, clock) if run.emulator == "shaper" else None
    state = () if model is None else model_state(model.model.layers, training.optimizer.name)
    first = first_state(run, scenario, compute, state)
    if run.first_step:
        for layer in layers_of(config.plan, config.device):
            compute.put_layer_state(one_layer(scenario, layer), first.row(layer))
    backups = StateBackups(config.device, run.backup_every, scenario, compute, first) if config.recovers else None
    checkpoints = None
    if run.checkpoint_every:
        checkpoints = Checkpointing(run, config.device, scenario, state, compute, give_up)
    file = EventWriter(config.folder.of_rank("events", config.rank))
    samples = SampleFile(config.folder.of_rank("resources", config.rank))
    # The first plan is compiled, and all that takes its time is done, before the run's first second.
    config.program(config.plan)
    # What is there by now stays: to look for what is not needed any more takes a millisecond then.
    gc.freeze()
    return RankContext(compute, clock, shaper, group, file, samples, backups, checkpoints, array("q"), array("d"))
