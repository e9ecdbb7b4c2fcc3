"""What each device does in one step of a plan: actions in order, with the transfers they need and cause.

Both backends carry out these programs, so that a plan means the same work and the same bytes in both.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType

from planner.actions import Action, Kind
from planner.events import SYNC_ACTION, Event, EventKind
from planner.plan import Pipeline, Plan
from planner.scenario import Scenario
from planner.schedules import SCHEDULES


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes from one device to another: an activation forward, or a gradient back.

    Attributes:
        source: Sending device.
        target: Receiving device.
        kind: Of the action that it feeds, `Kind.FORWARD` or `Kind.BACKWARD`.
        pipeline: Index of the pipeline.
        stage: The receiving stage.
        microbatch: Index in the pipeline.
        first: First sample of the microbatch that it carries.
        end: After the last one.
        size_bytes: On the wire.
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


@dataclass(frozen=True, slots=True)
class Work:
    """One action of a device.

    Attributes:
        action: What is done.
        pipeline: Index of the pipeline.
        first: First sample of the microbatch that this device takes.
        end: After the last one.
        duration_s: What the profile says it lasts, seconds.
        receives: What must have arrived before it starts.
        sends: What leaves when it ends.
    """

    action: Action
    pipeline: int
    first: int
    end: int
    duration_s: float
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class GradientSync:
    """Gradients of consecutive layers, summed over the devices that hold them.

    Attributes:
        first_layer: Index of the first layer.
        end_layer: Index after the last one.
        devices: In ring order.
        elements: Numbers to sum.
    """

    first_layer: int
    end_layer: int
    devices: tuple[str, ...]
    elements: int

    def position(self, device: str) -> int:
        """Return the place of a device in the ring."""
        return self.devices.index(device)

    def neighbours(self, device: str) -> tuple[str, str]:
        """Return the devices before and after a device in the ring."""
        position = self.position(device)
        return self.devices[position - 1], self.devices[(position + 1) % len(self.devices)]


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """One device's part of one step.

    Attributes:
        device: Its name.
        pipeline: Index of the pipeline it works for.
        stage: Index of its stage.
        work: Its actions in order.
        synchronisations: Gradient sums after the last action, in order.
    """

    device: str
    pipeline: int
    stage: int
    work: tuple[Work, ...]
    synchronisations: tuple[GradientSync, ...]

    # Both backends make their rows here, so that they are the same rows. Times come last, in seconds of the run.

    def compute_event(self, step: int, action: Action, start_s: float, end_s: float) -> Event:
        """Return the row for an action."""
        return self._event(EventKind.COMPUTE, step, str(action.kind), start_s, end_s, microbatch=action.microbatch)

    def transfer_event(self, kind: EventKind, step: int, transfer: Transfer, start_s: float, end_s: float) -> Event:
        """Return the row for sending or receiving a transfer."""
        peer = transfer.target if kind is EventKind.SEND else transfer.source
        size_bytes, microbatch = transfer.size_bytes, transfer.microbatch
        action = str(transfer.kind)
        return self._event(kind, step, action, start_s, end_s, peer=peer, microbatch=microbatch, size_bytes=size_bytes)

    def exchange_event(self, step: int, peer: str, size_bytes: int, start_s: float, end_s: float) -> Event:
        """Return the row for sending a chunk of gradients round the ring."""
        return self._event(EventKind.SEND, step, SYNC_ACTION, start_s, end_s, peer=peer, size_bytes=size_bytes)

    def sync_event(self, step: int, size_bytes: int, start_s: float, end_s: float) -> Event:
        """Return the row for a whole gradient sum, with the bytes that this device sent for it."""
        return self._event(EventKind.SYNC, step, SYNC_ACTION, start_s, end_s, size_bytes=size_bytes)

    def _event(
        self,
        kind: EventKind,
        step: int,
        action: str,
        start_s: float,
        end_s: float,
        *,
        peer: str = "",
        microbatch: int = -1,
        size_bytes: int = 0,
    ) -> Event:
        place = (self.device, peer, self.pipeline, self.stage, microbatch)
        return Event(kind, *place, step, action, start_s, end_s, size_bytes)


@lru_cache(maxsize=32)
def compile_plan(plan: Plan, scenario: Scenario) -> Mapping[str, DeviceProgram]:
    """Return the program of every device of the plan, in rank order.

    Remembered for the last plans: a step asks for its plan on every device, a policy for its candidates at every step.
    The plan must have passed `planner.check.check_plan` for this scenario.
    """
    synchronisations = gradient_syncs(plan, scenario)
    programs: dict[str, DeviceProgram] = {}
    for pipeline_index, pipeline in enumerate(plan.pipelines):
        for stage_index, stage in enumerate(pipeline.stages):
            order = SCHEDULES[plan.schedule](pipeline, stage_index)
            for replica_index, replica in enumerate(stage.replicas):
                work = (
                    _work(action, scenario, pipeline, pipeline_index, replica_index, replica.device) for action in order
                )
                programs[replica.device] = DeviceProgram(
                    replica.device,
                    pipeline_index,
                    stage_index,
                    tuple(item for item in work if item.end > item.first),
                    tuple(sync for sync in synchronisations if replica.device in sync.devices),
                )
    return MappingProxyType(programs)


def _work(
    action: Action, scenario: Scenario, pipeline: Pipeline, pipeline_index: int, replica: int, device: str
) -> Work:
    stage = pipeline.stages[action.stage]
    first, end = stage.intervals(pipeline.microbatches[action.microbatch])[replica]
    kind = scenario.cluster.by_name[device].kind
    times = scenario.model.times(stage.first_layer, stage.end_layer, kind, end - first)
    forward = action.kind is Kind.FORWARD
    last = len(pipeline.stages) - 1
    receives: tuple[Transfer, ...] = ()
    sends: tuple[Transfer, ...] = ()
    if forward:
        if action.stage > 0:
            receives = _crossing(scenario, pipeline, pipeline_index, action, action.stage - 1, into=device)
        if action.stage < last:
            next_action = Action(action.stage + 1, Kind.FORWARD, action.microbatch)
            sends = _crossing(scenario, pipeline, pipeline_index, next_action, action.stage, out_of=device)
    else:
        if action.stage < last:
            receives = _crossing(scenario, pipeline, pipeline_index, action, action.stage + 1, into=device)
        if action.stage > 0:
            next_action = Action(action.stage - 1, Kind.BACKWARD, action.microbatch)
            sends = _crossing(scenario, pipeline, pipeline_index, next_action, action.stage, out_of=device)
    duration_s = times.forward_s if forward else times.backward_s
    return Work(action, pipeline_index, first, end, duration_s, receives, sends)


def _crossing(
    scenario: Scenario,
    pipeline: Pipeline,
    pipeline_index: int,
    action: Action,
    sending_stage: int,
    *,
    into: str = "",
    out_of: str = "",
) -> tuple[Transfer, ...]:
    """Transfers that feed ``action``: where a sender's and a receiver's sample intervals intersect."""
    samples = pipeline.microbatches[action.microbatch]
    senders, receivers = pipeline.stages[sending_stage], pipeline.stages[action.stage]
    boundary_layer = min(senders.end_layer, receivers.end_layer) - 1
    sample_bytes = scenario.model.layers[boundary_layer].output_bytes
    transfers = []
    for sender, (send_first, send_end) in zip(senders.replicas, senders.intervals(samples), strict=True):
        if out_of not in ("", sender.device):
            continue
        for receiver, (take_first, take_end) in zip(receivers.replicas, receivers.intervals(samples), strict=True):
            first, end = max(send_first, take_first), min(send_end, take_end)
            if into in ("", receiver.device) and first < end:
                transfers.append(
                    Transfer(
                        sender.device,
                        receiver.device,
                        action.kind,
                        pipeline_index,
                        action.stage,
                        action.microbatch,
                        first,
                        end,
                        (end - first) * sample_bytes,
                    )
                )
    return tuple(transfers)


def gradient_syncs(plan: Plan, scenario: Scenario) -> tuple[GradientSync, ...]:
    """Return the runs of layers that the same devices hold, where those are more than one."""

    def holders(layer: int) -> tuple[str, ...]:
        return tuple(_holders(plan, layer))

    result = []
    for devices, layers in groupby(range(len(scenario.model.layers)), key=holders):
        run = list(layers)
        elements = scenario.model.parameter_bytes(run[0], run[-1] + 1) // scenario.training.element_bytes
        if len(devices) > 1 and elements > 0:
            result.append(GradientSync(run[0], run[-1] + 1, devices, elements))
    return tuple(result)


def _holders(plan: Plan, layer: int) -> Iterable[str]:
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            if stage.first_layer <= layer < stage.end_layer:
                yield from (replica.device for replica in stage.replicas)
