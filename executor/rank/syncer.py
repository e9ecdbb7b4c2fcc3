"""The process of a syncer: a rank without layers of a pipeline, which takes the outer steps of diloco-decoupled.

Workers connect to it, each whenever it likes. All decisions are taken in one thread, which handles one event after the
other; every connection has threads of its own that send and hear, so that a worker that has stopped delays nobody.
"""

import queue
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path

import torch

from executor.core.control_channel import Channel, accept, listen, read_key
from executor.core.control_channel import Message as Words
from executor.core.messages import AwayWorker, CheckpointMark, pack
from executor.rank.context import RankConfig, RankContext
from executor.rank.control_client import ControlClient
from executor.recovery.checkpoint_file import LayerTensors, Part, with_outer
from executor.recovery.checkpoint_writer import separate_pipelines
from executor.recovery.checkpoints import CheckpointFolder
from executor.runtime.decoupled.common_layers import CommonLayers, Merged
from executor.runtime.decoupled.links import HELLO, LAST, MARK, NEWS, OVER, SENT, STATE, LayerLink, news_rows, sent_of
from executor.runtime.decoupled.state_relay import StateRelay
from executor.runtime.decoupled.updates import AWAY
from executor.runtime.outer.state import NoOuterState, OuterState
from executor.training.flat_state import FlatParameters, model_state
from executor.training.models.loading import LoadedModel
from planner.cost.synchronisation import layer_elements
from planner.events.event import OUTER_ACTION, UPDATE_ACTION, Event, EventKind
from planner.files.plan import plan_json
from planner.scenario.training import OPTIMIZER_STATES


@dataclass(eq=False, slots=True)
class _Holder:
    """A device of a worker.

    Attributes:
        layers: Its layers that this syncer merges.
        pending: Those whose newest version it lacks, and that no message under way has.
        link: The connection to it; None while it has no process.
        is_busy: Whether a message to it is under way.
        is_told: Whether it was told that the run is over.
        is_lost: Whether the head has ended its worker's session.
        session: Number of its worker's newest session that is known here.
    """

    name: str
    worker: int
    layers: frozenset[int]
    pending: set[int] = field(default_factory=set)
    link: LayerLink | None = None
    is_busy: bool = False
    is_told: bool = False
    is_lost: bool = False
    session: int = 0


@dataclass(eq=False, slots=True)
class _Snapshot:
    """This syncer's part of a checkpoint, as far as it is known (Chandy and Lamport, 1985).

    Attributes:
        layers: The state of its layers when the first worker had copied its own, and what was under way then.
        awaited: Devices whose workers have not copied their state as far as is known here: what they still send was on
            its way when the others had.
        away: Workers that copy none, since they were away when the head began the checkpoint.
    """

    layers: dict[int, LayerTensors]
    awaited: set[str]
    away: tuple[AwayWorker, ...]


class Syncer:
    """Takes the outer steps of its layers.

    Args:
        model: The model, whose parameters are the first common ones; None in paced compute.
        give_up: Called with an error that must end this process.
    """

    def __init__(
        self,
        config: RankConfig,
        context: RankContext,
        model: LoadedModel | None,
        client: ControlClient,
        give_up: Callable[[Exception], None],
    ) -> None:
        self._config = config
        self._context = context
        self._model = model
        self._client = client
        self._give_up = give_up
        plan, scenario, self._name = config.plan, config.scenario, config.device
        outer = plan.synchronisation.outer
        mine = outer.layers_of_syncer(self._name, len(scenario.model.layers))
        self._holders: dict[str, _Holder] = {}
        elements: dict[int, int] = {}
        for worker, devices in enumerate(layer_elements(plan, scenario)):
            for name, (_, held) in devices.items():
                own = {layer: count for layer, count in held.items() if layer in mine}
                self._holders[name] = _Holder(name, worker, frozenset(own))
                elements |= own
        state: OuterState | NoOuterState
        if model is None:
            state = NoOuterState(outer, elements.__getitem__)
        else:
            state = OuterState(outer, self._flat, elements, context.outer)
        samples = [pipeline.samples for pipeline in plan.pipelines]
        names = [leaders[0] for leaders in plan.leaders]
        self._common = CommonLayers(outer, samples, elements, state, context.outer, names)
        self._mine = mine
        self._snapshots: dict[int, _Snapshot] = {}
        self._last_snapshot = -1
        self._writing: list[threading.Thread] = []
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._rows: list[Event] = []
        self._is_concluding = False
        # What the head says of the checkpoint after the last step.
        self._last_mark = CheckpointMark(config.run.steps)
        self._relay = StateRelay(
            self._name,
            {holder.name: holder.worker for holder in self._holders.values()},
            {holder.name: holder.layers for holder in self._holders.values()},
            OPTIMIZER_STATES[scenario.training.optimizer.name] > 0,
            context.clock,
            lambda row: self._events.put(lambda: self._rows.append(row)),
        )
        self._listening = listen((client.own_address, 0))
        self.address = self._listening.getsockname()[:2]
        client.call_on("conclude", lambda words: self._events.put(partial(self._conclude, words)))
        client.call_on("lost", lambda words: self._events.put(partial(self._end_session, words)))

    def serve(self) -> None:
        """Take outer steps until the head ends the run."""
        threading.Thread(target=self._accept, name="workers", daemon=True).start()
        while not (self._is_concluding and self._has_told_all()):
            due_s = self._common.due_s
            timeout_s = None if due_s == inf else max(0.0, due_s - self._context.clock.now_s())
            with suppress(queue.Empty):
                self._events.get(timeout=timeout_s)()
            self._take_outer_steps(self._context.clock.now_s())
            self._publish()
        self._listening.close()
        if self._config.run.checkpoint_every:
            self._write(self._last_mark.checkpoint, self._copied(), self._last_mark.away)
        for thread in self._writing:
            thread.join()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the common parameters by the name ``LAYER.PARAMETER``; none in paced compute."""
        if self._model is None:
            return {}
        found = {}
        for layer in self._common.layers:
            self._flat(layer).put_parameters(self._common.parameters(layer))
            for name, parameter in self._model.model.layers[layer].named_parameters():
                found[f"{layer}.{name}"] = parameter.detach().contiguous()
        return found

    def _flat(self, layer: int) -> FlatParameters:
        assert self._model is not None
        return FlatParameters([self._model.model.layers[layer]])

    # --- connections, in threads of their own ---

    def _accept(self) -> None:
        key = read_key(self._config.folder.key)
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                # Closed at the end of the run.
                return
            threading.Thread(target=self._greet, args=(connection, key), daemon=True).start()

    def _greet(self, connection: socket.socket, key: bytes) -> None:
        try:
            channel = accept(connection, key)
        except OSError:
            connection.close()
            return
        words = channel.receive()
        if words is None or words["kind"] != HELLO or words["device"] not in self._holders:
            channel.close()
            return
        session, versions = int(words["session"]), dict(words["rows"])
        self._events.put(partial(self._join, self._holders[words["device"]], channel, session, versions))

    # --- events, in the thread of `serve` ---

    def _join(self, holder: _Holder, channel: Channel, session: int, versions: Mapping[int, int]) -> None:
        """Connect a device in a session of its worker, with these versions of its layers.

        In any but the first session it takes over all layers.
        """
        if session < holder.session:
            # Said while its process lived; the head has told since that it is lost.
            channel.close()
            return
        if holder.link is not None:
            holder.link.close()
        shaper, clock = self._context.shaper, self._context.clock
        emulation = None if shaper is None else shaper.between(self._name, holder.name)
        link: LayerLink

        def heard(words: Words, payload: torch.Tensor, arrived_s: float) -> None:
            self._events.put(partial(self._hear, holder, words, payload, arrived_s))

        def lost() -> None:
            self._events.put(lambda: self._lose(holder, link))

        link = LayerLink(channel, holder.name, clock, emulation, heard, lost, self._give_up)
        holder.link, holder.session = link, session
        holder.is_busy = holder.is_told = holder.is_lost = False
        self._common.rejoin(holder.worker, holder.layers)
        joins = session > 0
        holder.pending = {layer for layer in holder.layers if joins or self._common.version(layer) > versions[layer]}
        self._flush(holder)
        self._relay.connect(holder.name, link, joins=joins)

    def _end_session(self, words: Words) -> None:
        """Await the devices of a worker no longer, whose session the head has ended; they may never have connected.

        What they have sent before is still heard.
        """
        following = int(words["session"]) + 1
        for holder in (self._holders[name] for name in words["devices"]):
            if holder.session < following:
                holder.session, holder.is_lost = following, True
                self._disregard(holder)

    def _disregard(self, holder: _Holder) -> None:
        self._common.lose(holder.worker, holder.layers, self._context.clock.now_s())
        self._relay.lose(holder.name)

    def _lose(self, holder: _Holder, link: LayerLink) -> None:
        link.close()
        if holder.link is link:
            holder.link, holder.is_busy = None, False
            holder.pending.clear()
            self._disregard(holder)
            for checkpoint in list(self._snapshots):
                self._note_mark(holder, checkpoint)

    def _hear(self, holder: _Holder, words: Words, payload: torch.Tensor, arrived_s: float) -> None:
        if words["kind"] == LAST:
            self._relay.end(holder.name)
            self._client.send("last", device=holder.name)
        elif words["kind"] == STATE:
            self._relay.pass_on(holder.name, words, payload, arrived_s)
        elif words["kind"] == MARK:
            mark = CheckpointMark.from_data(words)
            if mark.checkpoint > self._last_snapshot:
                self._last_snapshot = mark.checkpoint
                self._take_snapshot(mark)
            self._note_mark(holder, mark.checkpoint)
        elif words["kind"] == SENT:
            sent = sent_of(words, payload)
            self._relay.note_sent(holder.name)
            for snapshot in self._snapshots.values():
                if holder.name in snapshot.awaited:
                    self._common.add_sent(snapshot.layers, sent)
            place = (self._name, holder.name, -1, -1, -1, sent.step)
            # Only marks the arrival, for the row of the sender.
            self._rows.append(Event(EventKind.RECEIVE, *place, UPDATE_ACTION, arrived_s, arrived_s, payload.numel()))
            self._common.arrive(holder.name, sent, arrived_s)

    def _depart(self, holder: _Holder, link: LayerLink | None, row: Event) -> None:
        self._rows.append(row)
        if holder.link is link:
            holder.is_busy = False
            self._flush(holder)

    def _conclude(self, words: Words) -> None:
        self._is_concluding, self._last_mark = True, CheckpointMark.from_data(words)
        self._take_outer_steps(inf)
        for holder in self._holders.values():
            self._flush(holder)

    # --- checkpoints ---

    def _copied(self) -> dict[int, LayerTensors]:
        return {layer: self._common.tensors(layer) for layer in self._common.layers}

    def _take_snapshot(self, mark: CheckpointMark) -> None:
        """Copy this syncer's state for a checkpoint, unless a worker that was away has joined again since.

        Steps of that worker may be in the state then, and its part would say that they are still to come.
        """
        sessions = {each.worker: each.session for each in mark.away}
        present = [each for each in self._holders.values() if each.worker not in sessions]
        absent = [each for each in self._holders.values() if each.worker in sessions]
        if all(each.session + (not each.is_lost) <= sessions[each.worker] for each in absent):
            awaited = {each.name for each in present if each.link is not None}
            self._snapshots[mark.checkpoint] = _Snapshot(self._copied(), awaited, mark.away)

    def _note_mark(self, holder: _Holder, checkpoint: int) -> None:
        """Note that a device sends nothing more that belongs to a checkpoint; write it after the last one.

        Earlier ones that the device has left out are never complete.
        """
        for earlier in [number for number in self._snapshots if number < checkpoint]:
            if holder.name in self._snapshots[earlier].awaited:
                del self._snapshots[earlier]
        snapshot = self._snapshots.get(checkpoint)
        if snapshot is None:
            return
        snapshot.awaited.discard(holder.name)
        if not snapshot.awaited:
            del self._snapshots[checkpoint]
            self._write(checkpoint, snapshot.layers, snapshot.away)

    def _write(self, checkpoint: int, layers: Mapping[int, LayerTensors], away: tuple[AwayWorker, ...]) -> None:
        thread = threading.Thread(target=self._write_files, args=(checkpoint, layers, away), name="checkpoint")
        self._writing = [each for each in self._writing if each.is_alive()] + [thread]
        thread.start()

    def _write_files(self, checkpoint: int, layers: Mapping[int, LayerTensors], away: tuple[AwayWorker, ...]) -> None:
        """Write this syncer's part, and before it one of its layers in place of each worker that is away."""
        try:
            config, plan = self._config, self._config.plan
            assert self._model is not None, "paced compute has no checkpoints"
            every = CheckpointFolder(Path(config.run.checkpoints))
            state = model_state(self._model.model.layers, config.scenario.training.optimizer.name)
            parts: dict[int, Mapping[int, LayerTensors]] = {
                worker: {layer: {AWAY: torch.tensor([step])} for layer in self._mine} for worker, step, _ in away
            }
            parts[len(plan.pipelines)] = layers
            samples, pipelines = checkpoint * plan.global_batch, separate_pipelines(plan)
            for pipeline, outer in parts.items():
                own = {layer: with_outer({}, outer.get(layer, {})) for layer in sorted(self._mine)}
                part = Part(checkpoint, plan_json(plan), samples, state, own, pipelines=pipelines)
                every.of_pipeline(pipeline).write(self._name, part)
            first, kept = config.run.first_step, config.run.checkpoints_kept
            for pipeline in parts:
                every.clear(every.of_pipeline(pipeline), pipelines, first, checkpoint, kept, own_speed=True)
        except Exception as error:
            self._give_up(error)

    # --- outer steps ---

    def _take_outer_steps(self, until_s: float) -> None:
        layers, merged = self._common.take_outer_steps(until_s)
        if not layers:
            return
        now_s = self._context.clock.now_s()
        self._rows += [self._row(each, now_s) for each in merged]
        for holder in self._holders.values():
            holder.pending |= holder.layers.intersection(layers)
            self._flush(holder)

    def _row(self, merged: Merged, now_s: float) -> Event:
        place = (self._name, merged.source, -1, -1, -1, merged.step)
        times_s = (merged.arrived_s, max(merged.arrived_s, now_s))
        return Event(EventKind.UPDATE, *place, OUTER_ACTION, *times_s, merged.size_bytes, merged.missed)

    def _flush(self, holder: _Holder) -> None:
        """Send a device the newest versions that it lacks, unless the message before has not departed."""
        link = holder.link
        if link is None or holder.is_busy:
            return
        if holder.pending:
            news = self._common.news(holder.pending, holder.worker)
            holder.pending.clear()
            holder.is_busy = True
            place, start_s = (self._name, holder.name, -1, -1, -1, news.newest), self._context.clock.now_s()

            def departed(end_s: float) -> None:
                size_bytes = news.payload.numel()
                row = Event(EventKind.SEND, *place, UPDATE_ACTION, start_s, end_s, size_bytes)
                self._events.put(partial(self._depart, holder, link, row))

            more = {"rows": news_rows(news), "snapshot": self._last_snapshot}
            link.send(NEWS, news.payload, start_s, departed, **more)
        elif self._is_concluding and not holder.is_told:
            holder.is_told = True
            link.send(OVER, torch.empty(0), self._context.clock.now_s())

    def _has_told_all(self) -> bool:
        return all(holder.link is None or holder.is_told or holder.is_lost for holder in self._holders.values())

    def _publish(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._client.send("rows", part=pack(rows, None, None))
