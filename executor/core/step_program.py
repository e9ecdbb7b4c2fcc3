"""The program of a device in a training step: its actions in order, their messages, and its gradient sums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType

import numpy as np

from planner.adapt.observation import PROBE_BYTES
from planner.cost.collectives import Exchange
from planner.cost.synchronisation import GradientSync, gradient_syncs
from planner.events.event import PROBE_ACTION, SYNC_ACTION, UPDATE_ACTION, Event, EventKind
from planner.plan.actions import Action, Kind
from planner.plan.plan import Plan
from planner.plan.regional_batch import RegionalRun, regional_runs
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.problem import KINDS
from planner.step.compile import CompiledStep, compile_step, compute_numbers
from planner.step.graph import Ints
from planner.step.sync import ready_buckets
from planner.step.tables import SYNC, UPDATE


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message between two stages: activations for the next stage, or gradients for the previous stage.

    Attributes:
        source: Name of the sending device.
        target: Name of the receiving device.
        kind: Kind of the action that needs the message: forward, backward or input gradient.
        stage: Index of the receiving stage.
        first: Index in the microbatch of the first sample in the message.
        end: Index of the sample after the last one.
        size_bytes: Size of the message as sent, after any compression.
    """

    source: str
    target: str
    kind: Kind
    pipeline: int
    stage: int
    microbatch: int
    first: int
    end: int
    size_bytes: int

    @property
    def sending_stage(self) -> int:
        """Index of the stage that sends the message."""
        return self.stage - 1 if self.kind is Kind.FORWARD else self.stage + 1


@dataclass(frozen=True, slots=True)
class Completed:
    """A gradient sum that may begin during an action, when the gradients of its layers are complete.

    Attributes:
        sync: Index of the sum in `DeviceProgram.synchronisations`.
        after_s: Time from the start of the action until the gradients are complete, by the profile.
    """

    sync: int
    after_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """One action of a device.

    Attributes:
        first: Index in the microbatch of the first sample that this device computes.
        end: Index of the sample after the last one.
        duration_s: Duration by the profile.
        receives: Messages that must arrive before the action.
        sends: Messages to send after the action.
        completes: Gradient sums that may begin during the action, in order.
        number: Number of the action among all actions of the step that compute, on all devices.
    """

    action: Action
    pipeline: int
    first: int
    end: int
    duration_s: float
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    completes: tuple[Completed, ...] = ()
    number: int = 0


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """One device's part of one step.

    Attributes:
        stage: Index of the device's stage; of the first stage if the device has several.
        work: The device's actions in order.
        synchronisations: Gradient sums in order.
        update_s: Duration of the optimizer's update by the profile.
        update_number: Number of the update among all actions of the step that compute, on all devices.
        step_actions: Number of these actions.
        regional: The runs of the step's batch by region if regions own data; empty otherwise.
        partners: The other devices of the tensor-parallel group, on its first device; empty on all other devices.
        overlaps: Whether gradient sums run during actions: each begins when an action completes its gradients, or at
            the start of the step if no action does. Otherwise all sums follow the last action.
    """

    device: str
    pipeline: int
    stage: int
    work: tuple[Work, ...]
    synchronisations: tuple[GradientSync, ...]
    update_s: float = 0.0
    partners: tuple[str, ...] = ()
    overlaps: bool = False
    update_number: int = 0
    step_actions: int = 0
    regional: tuple[RegionalRun, ...] = ()

    def compute_event(self, step: int, action: Action, start_s: float, end_s: float, late_s: float) -> Event:
        """Return the event row of an action."""
        place = (action.stage, action.microbatch)
        return self._event(EventKind.COMPUTE, step, str(action.kind), start_s, end_s, place=place, late_s=late_s)

    def update_event(self, step: int, start_s: float, end_s: float, late_s: float) -> Event:
        """Return the event row of the optimizer's update."""
        return self._event(EventKind.COMPUTE, step, UPDATE_ACTION, start_s, end_s, late_s=late_s)

    def transfer_event(self, kind: EventKind, step: int, transfer: Transfer, start_s: float, end_s: float) -> Event:
        """Return the event row of the send or the receive of a transfer."""
        sent = kind is EventKind.SEND
        peer, stage = (transfer.target, transfer.sending_stage) if sent else (transfer.source, transfer.stage)
        place = (stage, transfer.microbatch)
        return self._event(kind, step, str(transfer.kind), start_s, end_s, peer, transfer.size_bytes, place)

    def exchange_event(
        self, kind: EventKind, step: int, peer: str, size_bytes: int, start_s: float, end_s: float
    ) -> Event:
        """Return the event row of the send or the receive of one round of a gradient sum."""
        return self._event(kind, step, SYNC_ACTION, start_s, end_s, peer, size_bytes)

    def probe_event(self, kind: EventKind, step: int, peer: str, start_s: float, end_s: float) -> Event:
        """Return the event row of the send or the receive of a probe."""
        return self._event(kind, step, PROBE_ACTION, start_s, end_s, peer, PROBE_BYTES)

    @property
    def targets(self) -> list[str]:
        """The receiving device of each message that this device sends in the step."""
        sent = [transfer.target for work in self.work for transfer in work.sends]
        return sent + [sync.devices[each.send_to] for sync, each in self._exchanges if each.send_to is not None]

    @property
    def sources(self) -> list[str]:
        """The sending device of each message that this device receives in the step."""
        received = [transfer.source for work in self.work for transfer in work.receives]
        summed = [(sync.devices, each.receive_from) for sync, each in self._exchanges]
        return received + [devices[source] for devices, source in summed if source is not None]

    @property
    def _exchanges(self) -> list[tuple[GradientSync, Exchange]]:
        return [(sync, each) for sync in self.synchronisations for each in sync.exchanges(self.device)]

    def sync_event(self, step: int, size_bytes: int, start_s: float, end_s: float) -> Event:
        """Return the event row of a gradient sum; ``size_bytes`` is what this device sent in all its rounds."""
        return self._event(EventKind.SYNC, step, SYNC_ACTION, start_s, end_s, size_bytes=size_bytes)

    def _event(
        self,
        kind: EventKind,
        step: int,
        action: str,
        start_s: float,
        end_s: float,
        peer: str = "",
        size_bytes: int = 0,
        place: tuple[int, int] | None = None,
        late_s: float = 0.0,
    ) -> Event:
        """Return an event row; ``place`` is stage and microbatch, by default this device's stage and -1 for none."""
        stage, microbatch = place or (self.stage, -1)
        where = (self.device, peer, self.pipeline, stage, microbatch)
        return Event(kind, *where, step, action, start_s, end_s, size_bytes, late_s=late_s)


@lru_cache(maxsize=32)
def compile_plan(plan: Plan, scenario: Scenario) -> Mapping[str, DeviceProgram]:
    """Return the programs of a plan's devices by name; of a tensor-parallel group only that of the first device.

    The plan must have passed `planner.check.check_plan` for this scenario.
    """
    step, syncs = compile_step(plan.without_overlap, scenario), gradient_syncs(plan, scenario)
    partners = {replica.device: replica.partners for replica in plan.replicas}
    overlaps = plan.synchronisation.bucket_bytes > 0
    regional = regional_runs(plan, scenario)
    numbers = compute_numbers(step)
    work = _work(step, numbers, _transfers(step), _completes(step, syncs, plan, scenario) if overlaps else {})
    programs = {}
    for actor, device in enumerate(step.actors):
        first, end = step.graph.first_action[actor : actor + 2].tolist()
        own = [work[action] for action in range(first, end) if action in work]
        pipeline, stage = int(step.pipeline[actor]), int(step.stage[actor])
        own_syncs = tuple(sync for sync in syncs if device in sync.devices)
        updates = first + np.flatnonzero(step.actions.kind[first:end] == UPDATE)
        update_s = float(step.actions.duration_s[updates].sum())
        update_number = int(numbers[updates].sum())
        programs[device] = DeviceProgram(
            device,
            pipeline,
            stage,
            tuple(own),
            own_syncs,
            update_s,
            partners[device],
            overlaps,
            update_number,
            int(numbers[-1]) + 1,
            regional,
        )
    return MappingProxyType(programs)


@lru_cache(maxsize=32)
def device_program(plan: Plan, scenario: Scenario, device: str) -> DeviceProgram:
    """Return the program of any device of a plan that passes `planner.check.check_plan` for the scenario.

    In a tensor-parallel group each other device has the same actions as the first one, but sends and receives nothing
    for them. Its shards' gradients are summed with those of the same shards in the stage's other replicas.
    """
    programs = compile_plan(plan, scenario)
    if device in programs:
        return programs[device]
    groups = {replica.device: replica.devices for replica in plan.replicas}
    leader = next(leader for leader, devices in groups.items() if device in devices)
    place = groups[leader].index(device)
    own = programs[leader]
    return replace(
        own,
        device=device,
        work=tuple(replace(work, receives=(), sends=()) for work in own.work),
        synchronisations=tuple(
            sync.among([groups[name][place] for name in sync.devices]) for sync in own.synchronisations
        ),
        partners=(),
    )


def _transfers(step: CompiledStep) -> dict[int, Transfer]:
    """Return the messages between stages by their index in ``step.messages``; gradient sums are left out."""
    actions, messages = step.actions, step.messages
    fed = messages.receiver
    columns = (
        actions.actor[messages.sender],
        actions.actor[fed],
        actions.kind[fed],
        actions.pipeline[fed],
        actions.stage[fed],
        actions.microbatch[fed],
        messages.start_sample,
        messages.stop_sample,
        messages.size_bytes,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {
        message: Transfer(step.actors[source], step.actors[target], KINDS[kind], *place)
        for message, (source, target, kind, *place) in enumerate(rows)
        if kind != SYNC
    }


def _completes(
    step: CompiledStep, syncs: Sequence[GradientSync], plan: Plan, scenario: Scenario
) -> dict[int, list[Completed]]:
    """Return the gradient sums that may begin during each action, by the action's index in ``step.actions``."""
    found: dict[int, list[Completed]] = {}
    for _, buckets in groupby(ready_buckets(syncs, step.actions, step.actors, plan, scenario), lambda each: each.actor):
        for place, each in enumerate(buckets):
            found.setdefault(each.action, []).append(Completed(place, each.after_s))
    return found


def _work(
    step: CompiledStep, numbers: Ints, transfers: Mapping[int, Transfer], completes: Mapping[int, Sequence[Completed]]
) -> dict[int, Work]:
    """Return the work by the action's index in ``step.actions``; gradient sums and updates are left out."""
    graph = step.graph
    first_received, received = graph.first_received.tolist(), graph.received.tolist()
    first_sent = graph.first_sent.tolist()
    rows = zip(*(column.tolist() for column in step.actions[1:]), strict=True)
    work = {}
    for action, (kind, pipeline, stage, microbatch, first, end, duration_s) in enumerate(rows):
        if kind >= SYNC:
            continue
        receives = tuple(transfers[each] for each in received[first_received[action] : first_received[action + 1]])
        sends = tuple(transfers[each] for each in range(first_sent[action], first_sent[action + 1]))
        done = Action(stage, KINDS[kind], microbatch)
        completed = tuple(completes.get(action, ()))
        work[action] = Work(done, pipeline, first, end, duration_s, receives, sends, completed, int(numbers[action]))
    return work


@dataclass(frozen=True, slots=True)
class StepProgram:
    """A rank's program in one step, with the plan of that step, and the samples of all steps before it."""

    step: int
    plan: Plan
    program: DeviceProgram
    samples_before: int
