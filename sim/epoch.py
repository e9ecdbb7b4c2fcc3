"""An epoch of a run: steps for which devices, layers and connections stay where they are."""

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import simpy

from planner.adapt.migration import LayerTransfer
from planner.check.paths import between_stages
from planner.cost.synchronisation import UpdateEdge, syncer_pairs, update_edges
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.compile import compile_step
from sim.backups import BackupFlows, BackupMessage
from sim.engine import PostedReceives, StepEngine
from sim.kernel.devices import make_devices
from sim.kernel.events import Timer
from sim.migration import LayerMessage, StateTransfer
from sim.network.connection import Message
from sim.network.network import Network
from sim.recorder import Recorder
from sim.step import StepRun, StepRuns
from sim.step_gate import PolicyClock, StepGate, StopCondition
from sim.updates.async_updates import AsyncUpdates, UpdateMessage
from sim.updates.decoupled import DecoupledUpdates
from sim.updates.layer_holders import LayersMessage
from sim.updates.state_transfers import StatesMessage, migrate_event


@dataclass(frozen=True, slots=True)
class Epoch:
    """The start of an epoch.

    Attributes:
        transfers: Layer transfers before the first step; devices that receive no layers begin at once.
        ready_s: Time at which each device finished the previous epoch, seconds from the start of the run.
        earliest_s: Earliest start of devices that were not in the previous epoch, seconds from the start of the run.
        observed_steps: Number of steps that the policy has observed; those from ``first_step`` on are repeated.
    """

    plan: Plan
    first_step: int = 0
    transfers: tuple[LayerTransfer, ...] = ()
    ready_s: Mapping[str, float] = field(default_factory=dict)
    earliest_s: float = 0.0
    observed_steps: int = 0

    def ready_at_s(self, device: str) -> float:
        """Return when a device can begin to send or to compute, seconds from the start of the run."""
        return self.ready_s.get(device, self.earliest_s)

    def communicating_pairs(
        self, scenario: Scenario, edges: Iterable[UpdateEdge], backups: Iterable[LayerTransfer], *, adapts: bool
    ) -> dict[tuple[str, str], bool]:
        """Return the pairs (source, target) of devices that communicate; True if also outside of a step's graph.

        With ``adapts``, a later plan may let any devices of neighbouring stages communicate.
        """
        compiled = compile_step(self.plan, scenario)
        graph, actors = compiled.graph, compiled.actors
        channels = zip(graph.channel_sender.tolist(), graph.channel_receiver.tolist(), strict=True)
        pairs = {(actors[sender], actors[receiver]): False for sender, receiver in channels}
        for pipeline in self.plan.pipelines if adapts else ():
            pairs |= dict.fromkeys(between_stages(pipeline), False)
        pairs |= {(edge.sender, edge.receiver): True for edge in edges}
        pairs |= dict.fromkeys(syncer_pairs(self.plan), True)
        return pairs | {(each.source, each.target): True for each in (*self.transfers, *backups)}


class EpochRun:
    """Carries out an epoch, up to the end of the run or to a decision that begins a new epoch."""

    def __init__(
        self,
        scenario: Scenario,
        epoch: Epoch,
        policy: PolicyClock | None,
        stop: StopCondition,
        recorder: Recorder,
        updates: AsyncUpdates,
        backup_every: int = 0,
    ) -> None:
        plan = epoch.plan
        actors = compile_step(plan, scenario).actors
        groups = {replica.device: replica.devices for replica in plan.replicas}
        self._recorder = recorder
        self._groups = [groups[actor] for actor in actors]
        self._devices = make_devices(self._groups, scenario)
        self._devices.clock_s[:] = [max(map(epoch.ready_at_s, group)) for group in self._groups]
        clocks_s = [*self._devices.clock_s.tolist(), *(epoch.ready_at_s(each.source) for each in epoch.transfers)]
        self._environment = simpy.Environment(min(clocks_s))
        self._backups = BackupFlows(plan, scenario, backup_every, epoch.first_step)
        edges = update_edges(plan, scenario)
        pairs = epoch.communicating_pairs(scenario, edges, self._backups.moves, adapts=policy is not None)
        self.network = Network(self._environment, scenario, pairs, plan.connections)
        is_decoupled = plan.synchronisation.is_decoupled
        # Then the gate holds nobody back: workers may take more steps than the run has global batches.
        gated = StopCondition(sys.maxsize) if is_decoupled else stop
        self.gate = StepGate(scenario, policy, gated, len(actors), epoch.first_step, epoch.observed_steps)
        self.steps = StepRuns(plan, self.gate.adaptation, scenario, self.network)
        ready_notice = scenario.effects.network.ready_notice
        self._receives = PostedReceives(self.steps, self.gate, self.network) if ready_notice else None
        self._engine = StepEngine(self._environment, scenario, self.network, self._devices, self.steps, self._receives)
        self.updates = updates
        self._decoupled: DecoupledUpdates | None = None
        if is_decoupled:
            run = (self._environment, self.network, plan, scenario, actors)
            limits = (stop.steps, stop.duration_s)
            self._decoupled = DecoupledUpdates(*run, *limits, self._enter_at, self.gate.leave, recorder.add)
        actor_of = {name: actor for actor, group in enumerate(self._groups) for name in group}
        self._transfer = StateTransfer(epoch.transfers, actor_of)
        # Finished steps that ended after the ``until_s`` of the latest `run`, and that may be lost.
        self._unseen: list[StepRun] = []
        first = epoch.first_step
        is_copied = self._backups.is_due_at
        sent = updates.begin_epoch(first, edges, plan, actors, epoch.ready_at_s, is_copied)

        def settled_at_s(device: str) -> float:
            return max(epoch.ready_at_s(device), updates.settled_s(device, first))

        self._transfer.send(self.network, first, settled_at_s)
        self._send_updates(sent)
        waiting = self._transfer.waiting
        self._enter(epoch.first_step, [actor for actor in range(len(actors)) if actor not in waiting])

    def run(self, until_s: float = math.inf) -> None:
        """Process events up to ``until_s``; steps that end later may be lost, and the policy does not observe them."""
        unseen, self._unseen = self._unseen, []
        for step in unseen:
            self._finish(step, until_s)
        self._advance(until_s)
        while self._environment.peek() < until_s:
            self._next_event(until_s)

    def close(self) -> None:
        """Record the steps that not all devices have taken, after the end of the run."""
        if self._decoupled is not None:
            self._decoupled.close(self.now_s)
            for _, step in sorted(self.steps.items()):
                self._recorder.finish_part(step)

    def receive_layers(self) -> float:
        """Process events until all layers have arrived; return the time of the last arrival, seconds.

        The policy observes no step meanwhile.
        """
        begins_s = float(self._environment.now)
        self._advance(-math.inf)
        while self._transfer.waiting and self._environment.peek() < math.inf:
            self._next_event(-math.inf)
        return max(self._transfer.end_s, begins_s)

    def resumable_step(self, away: Collection[str]) -> int:
        """Return the step from which the run can go on without the devices in ``away``.

        It is the first unfinished step or, if the run makes copies of the state, the step of the newest complete ones.
        """
        return self._backups.newest_complete(self.gate.next_step, away)

    def restoring_transfers(self, step: int) -> tuple[LayerTransfer, ...]:
        """Return the transfers of copies before ``step`` to devices that have none, since their processes are new."""
        return self._backups.restoring_transfers(step)

    @property
    def is_over(self) -> bool:
        """Whether all actors have finished the last step within the time up to which the epoch has run."""
        return not self.gate.unfinished and not self._unseen

    @property
    def now_s(self) -> float:
        """Latest time that the environment or a device has reached, seconds from the start of the run."""
        return max(float(self._environment.now), float(self._devices.clock_s.max()))

    @property
    def ended_s(self) -> dict[str, float]:
        """Time at which each device finished its last step, seconds from the start of the run."""
        clocks_s = zip(self._groups, self._devices.clock_s.tolist(), strict=True)
        return {device: clock_s for group, clock_s in clocks_s for device in group}

    @property
    def waiting(self) -> list[str]:
        """Devices that have not finished the last step."""
        if not self.gate.unfinished:
            return []
        working = {actor for step in self.steps.values() for actor in step.working}
        waiting = working | self.gate.undecided | {*self.updates.waiting} | self._transfer.waiting
        return [self._groups[actor][0] for actor in sorted(waiting)]

    def _next_event(self, until_s: float) -> None:
        self._environment.step()
        while self.network.delivered:
            self._take(self.network.delivered.popleft(), until_s)
        if self._engine.is_ready:
            self._advance(until_s)

    def _take(self, message: Message, until_s: float) -> None:
        match message:
            case LayerMessage():
                self._recorder.add(migrate_event(message.transfer.source, message.transfer.target, message))
                actor = self._transfer.arrive(message)
                if actor is not None:
                    self._devices.clock_s[actor] = max(self._devices.clock_s[actor], message.arrived_s)
                    self._enter(self.gate.first_step, [actor])
            case BackupMessage():
                self._recorder.add(self._backups.arrive(message))
            case UpdateMessage():
                self._recorder.add(self.updates.send_event(message))
                waited, means = self.updates.arrive(message)
                self._send_updates(means)
                for number, actor in waited:
                    self._enter(number, [actor])
            case LayersMessage():
                assert self._decoupled is not None
                self._decoupled.deliver(message)
            case StatesMessage():
                assert self._decoupled is not None
                self._decoupled.transfers.deliver(message)
            case _:
                self._finish(self._engine.arrive(message), until_s)

    def _advance(self, until_s: float) -> None:
        """Advance ready actors through this step and into their next steps until all actors wait."""
        for number, actors in self._engine.advance():
            for actor in actors if self.updates.edges else ():
                self._send_updates(self.updates.finish(actor, float(self._devices.clock_s[actor])))
            if self._decoupled is not None:
                for actor in actors:
                    self._decoupled.finish(number, actor, float(self._devices.clock_s[actor]))
            self._enter(number + 1, actors)
            step = self.steps[number]
            step.unfinished -= len(actors)
            self._finish(step, until_s)

    def _send_updates(self, messages: list[UpdateMessage]) -> None:
        for message in messages:
            send = partial(self._send_update, message)
            if self.updates.edges[message.edge].part is None:
                send()
            else:
                # The clock of a device may be ahead, and an arrival before that may let it send means first.
                Timer(self._environment, message.ready_s, send)

    def _send_update(self, message: UpdateMessage, _: Timer | None = None) -> None:
        edge = self.updates.edges[message.edge]
        self.network.connection(edge.sender, edge.receiver).send(message)

    def _enter_at(self, number: int, actors: list[int], now_s: float) -> None:
        """Let actors that have waited for it start a step, not before ``now_s``."""
        self._devices.clock_s[actors] = np.maximum(self._devices.clock_s[actors], now_s)
        self._enter(number, actors)

    def _enter(self, number: int, actors: list[int]) -> None:
        """Let actors start a step, or wait until they may."""
        if self._decoupled is not None:
            actors = self._decoupled.steps.admit(number, actors, lambda actor: float(self._devices.clock_s[actor]))
        if not actors:
            return
        admitted = self.gate.admit(number, actors, self._devices.clock_s)
        if self.updates.edges:
            admitted = [actor for actor in admitted if self._has_updates(number, actor)]
        if admitted:
            for actor in admitted:
                clock_s = float(self._devices.clock_s[actor])
                self._backups.begin(self.network, number, self._groups[actor], clock_s)
            self._engine.start(number, admitted)

    def _has_updates(self, number: int, actor: int) -> bool:
        """Return whether the updates that an actor's step needs have arrived; if so, move its clock to the last one."""
        begins_s = self.updates.begin(number, actor, float(self._devices.clock_s[actor]))
        if begins_s is not None:
            self._devices.clock_s[actor] = begins_s
        return begins_s is not None

    def _finish(self, step: StepRun, until_s: float) -> None:
        """If all actors have finished a step, record the step and let the policy observe it."""
        if step.unfinished:
            return
        adapts = self.gate.adaptation is not None
        over_s = step.over_s if adapts or until_s < math.inf else until_s
        if over_s > until_s:
            self._unseen.append(step)
            return
        self._engine.forget(step.number)
        decision = self.gate.finish(step.number, self._recorder.finish(step), over_s)
        self._backups.forget(self.gate.next_step)
        if decision is not None:
            self._recorder.decide(decision, over_s)
        if adapts:
            if self._receives is not None:
                self._receives.post_planned()
            self._enter(self.gate.known_steps - 1, self.gate.release())
