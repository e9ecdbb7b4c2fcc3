"""Workers that train at their own speed, and syncers that take outer steps with whoever is there (diloco-decoupled).

A worker is a pipeline. Its steps never wait for messages of others. As devices may be ahead of SimPy's clock, whatever
depends on arrivals is decided by timers: at the end of each step of a device, and at each arrival.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

import simpy

from planner.events.event import OUTER_ACTION, UPDATE_ACTION, Event, EventKind
from planner.plan.outer_rounds import Contribution, Rounds
from planner.plan.plan import Plan
from planner.scenario.faults import Absence
from planner.scenario.scenario import Scenario
from planner.scenario.training import FLOAT32_BYTES
from sim.kernel.events import Timer
from sim.network.connection import Message
from sim.network.network import Network
from sim.updates.layer_holders import Holder, LayersMessage, holders_of
from sim.updates.state_transfers import StateTransfers
from sim.updates.worker_steps import WorkerSteps


@dataclass(eq=False, slots=True)
class _Presence:
    """Whether the devices of a worker are there, and what they lack after an absence.

    Attributes:
        absent: Number of its devices that are absent.
        missing: How many layers its devices lack of those that they need before they go on after an absence.
        held: Steps, each with an actor, that have ended meanwhile.
    """

    absent: int = 0
    missing: int = 0
    held: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_away(self) -> bool:
        """Whether one of its devices is absent."""
        return self.absent > 0


class DecoupledUpdates:
    """What workers and syncers do in a run.

    Args:
        actors: Name of each actor's device.
        steps: Number of global batches whose samples are trained.
        duration_s: Time from which no step starts, seconds from the start of the run.
        enter: Called with a step, actors that may begin it, and the present time.
        leave: Called with a number of actors that begin no further step.
        record: Called with each event.
    """

    def __init__(
        self,
        environment: simpy.Environment,
        network: Network,
        plan: Plan,
        scenario: Scenario,
        actors: Sequence[str],
        steps: int,
        duration_s: float,
        enter: Callable[[int, list[int], float], None],
        leave: Callable[[int], None],
        record: Callable[[Event], None],
    ) -> None:
        self._environment = environment
        self._network = network
        self._outer = outer = plan.synchronisation.outer
        self._actors = actors
        self._record = record
        self._present = [_Presence() for _ in plan.pipelines]
        fragments = outer.fragment_layers(len(scenario.model.layers))
        self._syncer = {layer: outer.syncer(index) for index, own in enumerate(fragments) for layer in own}
        self._holders = holders_of(plan, scenario, fragments)
        self._rounds = {layer: Rounds(len(plan.pipelines), outer) for layer in self._syncer}
        # By layer and worker: the message with the pseudo-gradient that waits at the syncer, and the last step in the
        # common parameters.
        self._there: dict[tuple[int, int], LayersMessage] = {}
        self._merged_step: dict[tuple[int, int], int] = {}
        self._under_way = 0
        # Devices that have ended their last step.
        self._ended: set[str] = set()
        holders = list(self._holders.values())
        self.transfers = StateTransfers(
            environment, network, scenario, holders, self._syncer, self._able, record, self._join
        )
        for fault in scenario.faults:
            for worker, pipeline in enumerate(plan.pipelines):
                names = {name for stage in pipeline.stages for replica in stage.replicas for name in replica.devices}
                if isinstance(fault, Absence) and fault.device in names:
                    Timer(environment, fault.start_s, partial(self._depart, worker, fault.end_s == inf))
                    if fault.end_s < inf:
                        Timer(environment, fault.end_s, partial(self._return, worker))
        actor_of = {name: actor for actor, name in enumerate(actors)}
        self.steps = WorkerSteps(plan, actor_of, steps, duration_s, enter, leave)

    # --- steps ---

    def finish(self, step: int, actor: int, now_s: float) -> None:
        """Note that an actor finishes a step at ``now_s``, which may be later than SimPy's time."""
        Timer(self._environment, now_s, lambda timer: self._end_step(step, actor, timer.time_s))

    def _end_step(self, step: int, actor: int, now_s: float) -> None:
        worker, holder = self.steps.worker_of(actor), self._holders.get(self._actors[actor])
        if self._lacks(worker):
            self._present[worker].held.append((step, actor))
            return
        if holder is not None:
            self._send(holder, step, now_s)
            self.transfers.give(holder, now_s)
            if self.steps.goes_on(worker, step + 1):
                self._take_over(holder, step + 1, now_s)
            else:
                self._ended.add(holder.name)
        if self.steps.finish(step, actor, now_s):
            self._check_end(now_s)

    def _check_end(self, now_s: float) -> None:
        """When no pseudo-gradient can come any more, take outer steps with all that are there."""
        if not self._under_way and self.steps.have_ended:
            self._merge([layer for layer, rounds in self._rounds.items() if rounds.there], now_s)

    # --- absences ---

    def _depart(self, worker: int, for_ever: bool, timer: Timer) -> None:
        self._present[worker].absent += 1
        for holder in self._of(worker):
            holder.pending.clear()
        self.transfers.lose(worker, timer.time_s)
        for rounds in self._rounds.values():
            rounds.lose(worker, timer.time_s)
        self._take_outer_steps(self._rounds, timer.time_s)
        if for_ever and self.steps.lose(worker):
            self._check_end(timer.time_s)

    def _return(self, worker: int, timer: Timer) -> None:
        """Let a worker that returns take over the parameters, and the state of another one, before it goes on."""
        present = self._present[worker]
        present.absent -= 1
        if present.is_away:
            return
        for rounds in self._rounds.values():
            rounds.rejoin(worker)
        present.missing = sum(len(holder.elements) for holder in self._of(worker))
        for holder in self._of(worker):
            holder.layers.join(self.steps.finished(worker))
            holder.news.clear()
            for layer in holder.elements:
                holder.pending[self._syncer[layer]].add(layer)
            for syncer in list(holder.pending):
                self._flush(syncer, holder, timer.time_s)
        if self.steps.goes_on(worker, self.steps.finished(worker)):
            self.transfers.ask(worker, timer.time_s)

    def _able(self) -> list[int]:
        """Return the workers that are there, and take further steps."""
        workers = (worker for worker, present in enumerate(self._present) if not present.is_away)
        going_on = (each for each in workers if self.steps.goes_on(each, self.steps.finished(each)))
        return [worker for worker in going_on if all(each.name not in self._ended for each in self._of(worker))]

    def _join(self, worker: int, now_s: float) -> None:
        """When a worker has all parameters again, take them over, and do what follows the steps that have ended."""
        present = self._present[worker]
        if present.is_away or self._lacks(worker):
            return
        for holder in self._of(worker):
            self._take_over(holder, self.steps.finished(worker), now_s)
        held, present.held = present.held, []
        for step, actor in held:
            self._end_step(step, actor, now_s)

    def _lacks(self, worker: int) -> bool:
        """Return whether a worker cannot go on after an absence yet."""
        return self._present[worker].missing > 0 or self.transfers.lacks(worker)

    def _of(self, worker: int) -> list[Holder]:
        return [holder for holder in self._holders.values() if holder.worker == worker]

    # --- messages ---

    def close(self, now_s: float) -> None:
        """Let workers take over what has arrived, after all messages of the run."""
        for holder in self._holders.values():
            if not self._present[holder.worker].is_away:
                self._take_over(holder, None, now_s)

    def _send(self, holder: Holder, step: int, now_s: float) -> None:
        """Send the pseudo-gradients that follow a step."""
        by_syncer: defaultdict[str, dict[int, Contribution]] = defaultdict(dict)
        for layer, contribution in holder.layers.send(step, now_s).items():
            by_syncer[self._syncer[layer]][layer] = contribution
        for syncer, sent in by_syncer.items():
            size_bytes = sum(self._outer.packed_bytes(holder.elements[layer]) for layer in sent)
            self._under_way += 1
            message = LayersMessage(
                step, -1, size_bytes, now_s, sender=holder.name, receiver=syncer, pipeline=holder.worker, sent=sent
            )
            self._network.connection(holder.name, syncer).send(message)

    def _flush(self, syncer: str, holder: Holder, now_s: float) -> None:
        """Send a worker the newest versions that it lacks, unless the message before has not departed."""
        layers = sorted(holder.pending[syncer])
        if not layers or syncer in holder.busy or self._present[holder.worker].is_away:
            return
        holder.pending[syncer].clear()
        holder.busy.add(syncer)
        versions = {
            layer: (self._rounds[layer].version, self._merged_step.get((layer, holder.worker), -1)) for layer in layers
        }
        size_bytes = FLOAT32_BYTES * sum(holder.elements[layer] for layer in layers)
        newest = max(version for version, _ in versions.values())
        message = LayersMessage(
            newest, -1, size_bytes, now_s, sender=syncer, receiver=holder.name, pipeline=-1, versions=versions
        )
        self._network.connection(syncer, holder.name).send(message)

    def deliver(self, message: LayersMessage) -> None:
        """Record the departure of a message, and await its arrival."""
        place = (message.sender, message.receiver, message.pipeline, -1, -1, message.step)
        times_s = (message.ready_s, message.departed_s)
        self._record(
            Event(EventKind.SEND, *place, UPDATE_ACTION, *times_s, message.size_bytes, arrived_s=message.arrived_s)
        )
        Timer(self._environment, message.arrived_s, lambda timer: self._arrive(message, timer.time_s))
        if message.versions:
            holder = self._holders[message.receiver]
            holder.busy.discard(message.sender)
            self._flush(message.sender, holder, message.departed_s)

    def _arrive(self, message: LayersMessage, now_s: float) -> None:
        if message.versions:
            holder = self._holders[message.receiver]
            present = self._present[holder.worker]
            if present.is_away:
                return
            new = message.versions.keys() - holder.news.keys()
            for layer, (version, merged_step) in message.versions.items():
                holder.layers.arrive(layer, version, merged_step)
                holder.news[layer] = message
            if present.missing:
                present.missing -= len(new)
                self._join(holder.worker, now_s)
            return
        self._under_way -= 1
        if not self.transfers.lacks(message.pipeline):
            self.transfers.note_sent(message.pipeline)
        for layer, contribution in message.sent.items():
            self._there[layer, contribution.worker] = message
            self._rounds[layer].arrive(contribution, now_s)
        self._take_outer_steps(message.sent, now_s)
        for due_s in {self._rounds[layer].due_s for layer in message.sent} - {inf}:
            layers = [layer for layer in message.sent if self._rounds[layer].due_s == due_s]
            Timer(self._environment, due_s, partial(self._after_grace, layers))
        self._check_end(now_s)

    def _after_grace(self, layers: Sequence[int], timer: Timer) -> None:
        self._take_outer_steps(layers, timer.time_s)

    # --- outer steps ---

    def _take_outer_steps(self, layers: Iterable[int], now_s: float) -> None:
        self._merge([layer for layer in layers if self._rounds[layer].due_s <= now_s], now_s)

    def _merge(self, layers: Sequence[int], now_s: float) -> None:
        """Take the outer steps of layers, and send the workers what they became."""
        if not layers:
            return
        merged: defaultdict[LayersMessage, list[tuple[int, int]]] = defaultdict(list)
        for layer in layers:
            before = self._rounds[layer].version
            for contribution in self._rounds[layer].take():
                self._merged_step[layer, contribution.worker] = contribution.step
                message = self._there.pop((layer, contribution.worker))
                merged[message].append((layer, before - contribution.base))
        for message, parts in merged.items():
            elements = self._holders[message.sender].elements
            size_bytes = sum(self._outer.packed_bytes(elements[layer]) for layer, _ in parts)
            place = (message.receiver, message.sender, -1, -1, -1, message.step)
            self._note(place, message, size_bytes, max(missed for _, missed in parts), now_s)
        for holder in self._holders.values():
            for layer in layers:
                if layer in holder.elements:
                    holder.pending[self._syncer[layer]].add(layer)
            for syncer in list(holder.pending):
                self._flush(syncer, holder, now_s)

    def _take_over(self, holder: Holder, step: int | None, now_s: float) -> None:
        """Record what a device takes over before a step; None at the end of its run."""
        brought: defaultdict[LayersMessage, list[int]] = defaultdict(list)
        for layer in holder.layers.take_over(step):
            brought[holder.news.pop(layer)].append(layer)
        for message, layers in brought.items():
            done = self.steps.finished(holder.worker) if step is None else step
            missed = max(done - 1 - message.versions[layer][1] for layer in layers)
            size_bytes = FLOAT32_BYTES * sum(holder.elements[layer] for layer in layers)
            place = (holder.name, message.sender, holder.worker, holder.stage, -1, message.step)
            self._note(place, message, size_bytes, missed, now_s)

    def _note(
        self, place: tuple[str, str, int, int, int, int], message: Message, size_bytes: int, missed: int, now_s: float
    ) -> None:
        self._record(
            Event(EventKind.UPDATE, *place, OUTER_ACTION, message.arrived_s, now_s, size_bytes, staleness=missed)
        )
