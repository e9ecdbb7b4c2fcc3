"""One rank of a run: connected to the others, it carries out all steps and writes what they left."""

import gc
import json
import os
import time
from array import array
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from executor.core.clock import RunClock, announce_origin
from executor.core.clock_sync import HeadClock
from executor.core.control_store import (
    ORIGIN,
    OVER,
    beginning_key,
    invitation_key,
    reach_control_store,
    ready_key,
    store_address,
    upload_results,
)
from executor.core.failures import SharedInputError
from executor.core.messages import SessionSpec
from executor.rank.context import RankConfig, RankContext
from executor.rank.control_client import GenerationEndedError
from executor.rank.handshake import Handshake, model_facts
from executor.rank.resources import SampleFile
from executor.rank.session import Session
from executor.recovery.backups import StateBackups
from executor.recovery.checkpoint_writer import Checkpointing
from executor.recovery.checkpoints import CheckpointFolder
from executor.recovery.initial_state import first_state, one_layer
from executor.recovery.restore_point import layers_of
from executor.training.compute import PacedCompute
from executor.training.device import compute_device, threads_of_a_rank
from executor.training.flat_state import model_state
from executor.training.models.loading import LoadedModel, load_with_sizes
from executor.training.noise_scale import NoiseMeasuringCompute, write_norms
from executor.training.real_compute import RealCompute
from executor.training.tensor_parallel import TensorGroup, form_group
from executor.transport.connection import RECV_TIMEOUT
from executor.transport.link_shaper import LinkShaper, measure_local_delivery_s
from executor.transport.rendezvous import CONNECT_S, ProcessGroups, connect, try_connections
from planner.events.event import EventWriter
from planner.scenario.cluster import Cluster

# At the end the others may have hours of work left. Who waits there still hears within seconds that a peer is gone.
_UNTIL_ALL_ARE_DONE = timedelta(days=365)

# From agreeing on the start of the run to the start: enough for everybody to hear of it and get ready.
HEAD_START_S = 0.5
_HEAD_START_LATENCIES = 8

# Between two looks at whether a process that has come later is needed.
_PAUSE_S = 0.005


class Rank:
    """The process of one rank.

    Args:
        part: This rank's in the job.
        give_up: Ends this process.
    """

    def __init__(self, part: RankConfig, give_up: Callable[[Exception], None]) -> None:
        self._part = part
        self._give_up = give_up
        self._trained: RealCompute | None = None
        # Sixteen bytes a step; everything else that grows with the steps goes to disk as it comes.
        self._losses = array("q"), array("d")
        torch.set_num_threads(threads_of_a_rank(int(os.environ.get("LOCAL_WORLD_SIZE", len(part.devices)))))

    def run(self, handshake: Handshake, head_start_s: float) -> None:
        """Run all steps with the others and write what they left.

        Args:
            handshake: With the other ranks.
            head_start_s: From agreeing on the start of the run to the start, besides what the links' latency asks for.
        """
        part, orders = self._part, self._part.orders
        # Loaded before the ranks agree on the start: models take their time.
        model = _load_together(part, handshake) if orders.compute == "real" else None
        if orders.checkpoints:
            _see_checkpoints(part, handshake)
        _connect(part, handshake)
        local_delivery_s = 0.0
        if orders.emulator == "shaper":
            local_delivery_s = measure_local_delivery_s(part.rank, len(part.devices))
        where = compute_device(part.scenario.cluster.by_name[part.device].kind, orders.compute)
        group = form_group(part.plan, part.device, RECV_TIMEOUT) if model else None
        groups = ProcessGroups(part.plan.connections, RECV_TIMEOUT)
        clock = RunClock()
        held = self._hold(model, clock, local_delivery_s, where, group)
        # The first plan is compiled, and all that takes its time is done, before the run's first second.
        part.program(part.plan)
        head = HeadClock()
        origin_s = _agreed_origin_s(part.rank, head.offset_s, part.scenario.cluster, head_start_s)
        clock.start(origin_s - head.offset_s)
        head.lead(clock)
        if part.rank == 0 and not orders.spread:
            announce_origin(part.folder.origin, origin_s)
        if part.recovers:
            store = reach_control_store(store_address())
            if part.rank == 0:
                store.set(ORIGIN, repr(origin_s))
            store.set(ready_key(part.rank, 0), str(local_delivery_s))
        beginning = SessionSpec.of_run(part.plan, len(part.devices), orders.first_step, orders.steps)
        self._live(held, Session(part, held, beginning, lambda: groups, self._give_up))

    def join(self, incarnation: int) -> None:
        """Take the place of a process of this rank that is gone, in a run that the others have begun.

        Args:
            incarnation: Which process of the rank this is, from 0.
        """
        part, orders = self._part, self._part.orders
        code, training = part.scenario.code, part.scenario.training
        model = load_with_sizes(code, training.seed) if orders.compute == "real" and code is not None else None
        store = reach_control_store(store_address())
        where = compute_device(part.scenario.cluster.by_name[part.device].kind, orders.compute)
        head = HeadClock()
        clock = RunClock(float(store.get(ORIGIN)) - head.offset_s)
        head.lead(clock)
        held = self._hold(model, clock, float(store.get(ready_key(part.rank, 0))), where, None)
        store.set(ready_key(part.rank, incarnation), "")
        # For as long as it takes: its device may be of no use for hours.
        while not store.check([invitation_key(part.rank, incarnation)]):
            if store.check([OVER]):
                return
            time.sleep(_PAUSE_S)
        generation = int(store.get(invitation_key(part.rank, incarnation)))
        beginning = SessionSpec.from_text(store.get(beginning_key(generation)).decode())
        self._live(held, self._regrouped(held, beginning))

    def _hold(
        self,
        model: LoadedModel | None,
        clock: RunClock,
        local_delivery_s: float,
        where: torch.device,
        group: TensorGroup | None,
    ) -> RankContext:
        part, training = self._part, self._part.scenario.training
        if model is not None:
            kind = NoiseMeasuringCompute if training.noise_scale else RealCompute
            self._trained = kind(model, part.plan, part.program(part.plan), training, clock, where, group)
        compute = self._trained or PacedCompute(clock)
        shaper = None
        if part.orders.emulator == "shaper":
            shaper = LinkShaper(part.folder.ledger, part.scenario.cluster, clock, local_delivery_s)
        state = () if model is None else model_state(model.model.layers, training.optimizer.name)
        first = first_state(part.orders, part.scenario, compute, state)
        if part.orders.first_step:
            for layer in layers_of(part.plan, part.device):
                compute.put_layer_state(one_layer(part.scenario, layer), first.row(layer))
        keeping, checkpointing = None, None
        if part.recovers:
            keeping = StateBackups(part.device, part.orders.backup_every, part.scenario, compute, first)
        if part.orders.checkpoint_every:
            checkpointing = Checkpointing(part.orders, part.device, part.scenario, state, compute, self._give_up)
        file, samples = EventWriter(part.folder.events(part.rank)), SampleFile(part.folder.resources(part.rank))
        # What is there by now stays: to look for what is not needed any more takes a millisecond then.
        gc.freeze()
        return RankContext(compute, clock, shaper, group, file, samples, keeping, checkpointing, self._note_loss)

    def _live(self, held: RankContext, generation: Session) -> None:
        """Go through generations until the run is over."""
        while True:
            try:
                generation.run(self._conclude)
                break
            except GenerationEndedError:
                generation.leave()
                beginning = generation.next_beginning()
            generation = self._regrouped(held, beginning)
            # Errors and the calls that they came through hold each other, and with them the connections of before.
            gc.collect()
        if held.shaper is not None:
            held.shaper.close()
        held.samples.close()
        held.file.close()
        dist.destroy_process_group()
        # Now nobody can be lost any more for whom something would have to be done again.
        if self._part.orders.spread:
            upload_results(reach_control_store(store_address()), self._part.folder, self._part.rank)

    def _regrouped(self, held: RankContext, beginning: SessionSpec) -> Session:
        """This rank in a generation whose ranks connect anew."""

        def meet() -> ProcessGroups:
            place, ranks = beginning.ranks.index(self._part.rank), len(beginning.ranks)
            store, patience = reach_control_store(store_address()), timedelta(seconds=CONNECT_S)
            connect(store, place, ranks, patience, f"generation-{beginning.generation}")
            return ProcessGroups(beginning.plans[0].plan.connections, patience)

        return Session(self._part, held, beginning, meet, self._give_up)

    def _note_loss(self, step: int, loss: float) -> None:
        self._losses[0].append(step)
        self._losses[1].append(loss)

    def _conclude(self) -> None:
        """Write what the steps have left."""
        part = self._part
        if not part.recovers:
            dist.barrier(timeout=_UNTIL_ALL_ARE_DONE)
        part.folder.losses(part.rank).write_text(json.dumps(list(zip(*self._losses, strict=True))))
        if self._trained is not None:
            parameters = {name: each.contiguous() for name, each in self._trained.named_parameters().items()}
            save_file(parameters, part.folder.parameters(part.rank))
        if isinstance(self._trained, NoiseMeasuringCompute):
            write_norms(self._trained.norms, part.folder, part.rank)


def _load_together(part: RankConfig, handshake: Handshake) -> LoadedModel:
    """The model, which is the same on all ranks."""
    code, seed, profile = part.scenario.code, part.scenario.training.seed, part.scenario.model
    assert code is not None, "the launcher has checked this"

    def load() -> tuple[LoadedModel, dict[str, str]]:
        model = load_with_sizes(code, seed)
        return model, model_facts(model.sizes, profile)

    return handshake.agree("model", load, RECV_TIMEOUT.total_seconds(), SharedInputError)


def _see_checkpoints(part: RankConfig, handshake: Handshake) -> None:
    """Refuse folders that are not the same one on all hosts."""
    folder, mark = CheckpointFolder(Path(part.orders.checkpoints)), part.orders.checkpoints_mark

    def see() -> tuple[None, dict[str, str]]:
        folder.check_held(mark)
        return None, {}

    handshake.agree("checkpoints", see, 2 * CONNECT_S, SharedInputError)


def _connect(part: RankConfig, handshake: Handshake) -> None:
    store, ranks = handshake.store, len(part.devices)
    # They end when the others are connected: nobody leaves while somebody else still tries.
    trial = handshake.agree("connections", lambda: (try_connections(store, part.rank, ranks), {}), 2 * CONNECT_S)
    connect(store, part.rank, ranks, RECV_TIMEOUT, "world")
    del trial


def _agreed_origin_s(rank: int, offset_s: float, cluster: Cluster, head_start_s: float) -> float:
    """The origin of the run's clock, by the head's: rank 0 says when it starts, a little after everyone has heard."""
    # Models take unequal times to load; and the news travels over connections that are warm.
    dist.barrier()
    head_start_s += _HEAD_START_LATENCIES * max((link.latency_s for link in cluster.links), default=0.0)
    origin_s = time.monotonic() + offset_s + head_start_s if rank == 0 else 0.0
    origin = torch.tensor([origin_s], dtype=torch.float64)
    dist.broadcast(origin, 0)
    return float(origin.item())
