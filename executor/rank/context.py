"""The configuration of one rank, and the objects that its process keeps over all sessions."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch

from executor.core.clock import RunClock
from executor.core.job import JobFolder, RunConfig
from executor.core.step_program import DeviceProgram, compile_plan, device_program
from executor.core.timeouts import timeouts
from executor.rank.telemetry import ResourceLog
from executor.recovery.backups import StateBackups, first_state, one_layer
from executor.recovery.checkpoint_file import LayerTensors
from executor.recovery.checkpoint_writer import Checkpointing, LauncherRows
from executor.recovery.checkpoints import CheckpointFolder
from executor.training.compute import PacedCompute
from executor.training.data.datasets import StreamedSamples
from executor.training.data.states import StateFolder
from executor.training.device import compute_device
from executor.training.flat_state import model_state
from executor.training.models.loading import LoadedModel
from executor.training.models.precision import boundary_dtype
from executor.training.noise_scale import NoiseMeasuringCompute
from executor.training.real_compute import Compute, RealCompute
from executor.training.tensor_parallel import TensorGroup, form_group
from executor.transport.link_shaper import LinkShaper
from executor.transport.staging import Copies, CudaCopies, PacedCopies
from executor.transport.wire_format import CompressedWire, UncheckedWire, Wire
from planner.adapt.copies import layers_of
from planner.adapt.gradient_noise import LocalNorms
from planner.cost.device_transport import NCCL, group_transport
from planner.events.event import EventWriter
from planner.plan.plan import Plan
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class RankConfig:
    """The configuration of one rank in a job, with the scenario, the first plan, and the devices in rank order."""

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
    def on_host(self) -> tuple[Device, ...]:
        """The devices of the ranks on this rank's host, in the order of ``LOCAL_RANK``."""
        devices = self.scenario.cluster.by_name
        own = devices[self.device].machine
        return tuple(devices[name] for name in self.devices if not self.run.spread or devices[name].machine == own)

    @property
    def place(self) -> int:
        """The index of this rank in `on_host`."""
        return [device.name for device in self.on_host].index(self.device)

    @property
    def recovers(self) -> bool:
        """Whether the run survives the loss of ranks by copies of the layers' state."""
        return self.run.backup_every > 0

    @property
    def uses_nccl(self) -> bool:
        """Whether the run uses NCCL where `planner.cost.device_transport` says so: not where ranks may share a GPU."""
        return self.run.compute == "real" and not self.run.on_this_device

    def group_uses_nccl(self, devices: Sequence[str]) -> bool:
        """Return whether a tensor-parallel group of these devices uses NCCL."""
        return self.uses_nccl and group_transport(self.scenario, devices) == NCCL

    @property
    def merges(self) -> frozenset[int]:
        """The layers whose outer steps this rank takes; if there are any, it trains nothing."""
        outer = self.plan.synchronisation.outer
        return outer.layers_of_syncer(self.device, len(self.scenario.model.layers)) if outer.syncers else frozenset()

    @property
    def takes_outer_steps(self) -> bool:
        """Whether this rank trains nothing, but takes outer steps."""
        return self.device in self.plan.synchronisation.outer.syncers

    @property
    def is_grouped(self) -> bool:
        """Whether this rank trains in a tensor-parallel group."""
        return any(replica.partners and self.device in replica.devices for replica in self.plan.replicas)

    def program(self, plan: Plan) -> DeviceProgram | None:
        """Return this rank's program under a plan; None if the plan does not use this rank's device."""
        if self.device not in plan.devices:
            return None
        program = device_program(plan, self.scenario, self.device)
        if self.run.compute == "real":
            return program
        # In paced compute only the first device of a tensor-parallel group runs the program; the others do nothing.
        if not self.leads(plan):
            return replace(program, work=(), synchronisations=(), update_s=0.0)
        return replace(
            program, synchronisations=tuple(replace(sync, in_one_message=True) for sync in program.synchronisations)
        )

    def leads(self, plan: Plan) -> bool:
        """Return whether a plan uses this rank's device alone, or as the first one of a tensor-parallel group."""
        return self.device in compile_plan(plan, self.scenario)

    def wire(self, plan: Plan) -> Wire:
        """Return the format of messages between stages under a plan."""
        if self.run.compute == "paced":
            return UncheckedWire()
        return CompressedWire(plan.compression, self.scenario.cluster, boundary_dtype(self.scenario.training.precision))


@dataclass(frozen=True, slots=True)
class RankContext:
    """The objects that the process of a rank keeps over all sessions.

    Attributes:
        shaper: Emulates the links in this process; None if the links are not emulated, or emulated by the relay.
        group: The tensor-parallel group of this rank; None if the rank computes alone.
        gpu: The CUDA device on which this rank computes; None if it computes on another one, or not at all.
        copies: The copies between the GPU and its host.
        file: The rank's event file.
        samples: Writes the process's resources at the end of each step.
        backups: Copies of the state in memory; None if the run ends with the first lost rank.
        checkpoints: Writes the state to disk; None if the run writes no checkpoints.
        outer: The state of the outer steps of this rank's layers, from the checkpoint from which the run resumes.
        losses: The line-buffered file of this rank's parts of the losses, with a step and its part in each line.
    """

    compute: Compute
    clock: RunClock
    shaper: LinkShaper | None
    group: TensorGroup | None
    gpu: torch.device | None
    copies: Copies
    file: EventWriter
    samples: ResourceLog
    backups: StateBackups | None
    checkpoints: Checkpointing | None
    outer: Mapping[int, LayerTensors]
    losses: TextIO

    @property
    def trained(self) -> RealCompute | None:
        """The compute of the trained model; None in paced compute."""
        return self.compute if isinstance(self.compute, RealCompute) else None

    def norms_of(self, step: int) -> LocalNorms | None:
        """Return the norms of the last step's gradients, if this is ``step`` and they were measured."""
        found = self.compute.norms[-1:] if isinstance(self.compute, NoiseMeasuringCompute) else []
        return next((norms for norms in found if norms.step == step), None)


def _copies(config: RankConfig, clock: RunClock, gpu: torch.device | None, group: TensorGroup | None) -> Copies:
    """Return the copies between the GPU of a rank and its host, or the times of those that a paced run stands for."""
    if gpu is not None:
        enters = group is None or group.device == gpu
        return CudaCopies(config.scenario, gpu, clock, uses_nccl=config.uses_nccl, enters=enters)
    if config.run.compute == "paced" and config.scenario.effects.transport.copies:
        return PacedCopies(config.scenario, clock)
    return Copies()


def build_context(
    config: RankConfig,
    model: LoadedModel | None,
    give_up: Callable[[Exception], None],
    rows: LauncherRows,
    *,
    is_connected: bool,
) -> RankContext:
    """Return the objects that this process keeps; the clock is not started yet.

    Args:
        config: The configuration of the rank.
        model: The model to train; None in paced compute.
        give_up: Called with an error that must end this process, in the thread where the error occurred.
        rows: The rows of this rank's steps that the launcher has.
        is_connected: Whether the ranks of the job are connected, so that they can form tensor-parallel groups.
    """
    scenario, run, training = config.scenario, config.run, config.scenario.training
    where = compute_device([device.kind for device in config.on_host], config.place, run.compute)
    group = None
    if model is not None and is_connected:
        group = form_group(
            config.plan, config.device, timedelta(seconds=timeouts().recv_s), where, config.group_uses_nccl
        )
    clock = RunClock()
    gpu = where if where.type == "cuda" else None
    # Before layers are sharded, so that checkpoints suit groups of all sizes.
    state = () if model is None else model_state(model.model.layers, training.optimizer.name)
    compute: Compute = PacedCompute(clock, scenario.effects.compute)
    if model is not None:
        kind = NoiseMeasuringCompute if training.measures_noise else RealCompute
        compute = kind(
            model,
            config.plan,
            config.program(config.plan),
            training,
            clock,
            where,
            group,
            scenario.effects.compute,
            run.at_profile_speed,
        )
    if model is not None and run.checkpoint_every and isinstance(model.data, StreamedSamples):
        interval = run.checkpoint_every * training.global_batch
        model.data.keep_states(StateFolder(CheckpointFolder(Path(run.checkpoints)).data_states, interval))
    shaper = LinkShaper(config.folder.ledger, scenario.cluster, clock) if run.emulator == "shaper" else None
    program = config.program(config.plan)
    pipeline = 0 if program is None else program.pipeline
    # The part of syncers follows those of the pipelines, of which the plan of the checkpoint may have more.
    first = first_state(run, scenario, compute, state, -1 if config.merges else pipeline)
    outer: dict[int, LayerTensors] = {}
    if run.first_step:
        own = sorted(layers_of(config.plan, config.device))
        for layer, row in zip(own, first.rows(own), strict=True):
            compute.put_layer_state(one_layer(scenario, layer), row)
        for layer in sorted(config.merges) or own:
            if found := first.outer(layer):
                outer[layer] = found
    backups = (
        StateBackups(config.device, run.backup_every, scenario, compute, clock, first) if config.recovers else None
    )
    checkpoints = None
    if run.checkpoint_every and model is not None:
        layers = model.model.layers
        checkpoints = Checkpointing(run, config.device, scenario, state, layers, compute, give_up, rows)
    file = EventWriter(config.folder.recorded(run, "events", config.rank))
    losses = config.folder.recorded(run, "losses", config.rank).open("w", buffering=1)
    samples = ResourceLog(config.folder.of_rank("resources", config.rank))
    # Exclude the present objects, which stay until the end, from garbage collections: each then takes a millisecond.
    gc.freeze()
    copies = _copies(config, clock, gpu, group)
    return RankContext(compute, clock, shaper, group, gpu, copies, file, samples, backups, checkpoints, outer, losses)
