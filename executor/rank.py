"""One rank of a run: connected to the others, it carries out all steps and writes what they left."""

import json
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from executor.checked_wire import CheckedWire
from executor.clock import RunClock
from executor.compute import Compute, PacedCompute
from executor.compute_device import compute_device, threads_of_a_rank
from executor.control import PlanFeed, store_address
from executor.fingerprint import Job, model_facts
from executor.handshake import Handshake
from executor.interpreter import Interpreter
from executor.job import JobFolder
from executor.local_delivery import measure_local_delivery_s
from executor.model import LoadedModel, load_with_sizes
from executor.noise_compute import NoiseMeasuringCompute
from executor.noise_files import write_norms
from executor.peers import SharedInputError
from executor.real_compute import RealCompute
from executor.rendezvous import CONNECT_S, connect, try_connections
from executor.resources import SampleFile, sample_resources
from executor.row_log import RowLog
from executor.shaper import LinkShaper
from executor.steps import StepSource, run_steps
from executor.training.tensor_parallel import RankGroup
from executor.training.tensor_parallel_rows import PartnerRows
from executor.transport import Transport
from executor.updates import PipelineUpdates
from executor.wan.origin import announce_origin
from executor.wire import AsItIs, Compressing, Wire
from planner.cluster import Cluster
from planner.events import EventWriter
from planner.plan import Plan
from planner.program import DeviceProgram, compile_plan, device_program
from planner.update_exchange import update_edges

# A link may be out for minutes; whoever waits longer than this for a peer gives up.
PATIENCE = timedelta(minutes=30)

# At the end the others may have hours of work left. Who waits there still hears within seconds that a peer is gone.
_UNTIL_ALL_ARE_DONE = timedelta(days=365)

# From agreeing on the start of the run to the start: enough for everybody to hear of it and get ready.
HEAD_START_S = 0.5
_HEAD_START_LATENCIES = 8


class Rank:
    """Everything that one rank holds.

    Args:
        job: Its files.
        rank: This one.
        given: What the files say.
        handshake: With the other ranks.
        give_up: Ends this process.
        head_start_s: From agreeing on the start of the run to the start, besides what the links' latency asks for.
    """

    def __init__(
        self,
        job: JobFolder,
        rank: int,
        given: Job,
        handshake: Handshake,
        give_up: Callable[[Exception], None],
        head_start_s: float,
    ) -> None:
        self._job = job
        self._rank = rank
        self._scenario, self._plan, self._orders = given
        self._handshake = handshake
        self._give_up = give_up
        self._head_start_s = head_start_s
        self._device = self._plan.devices[rank]
        # Eight bytes a step; everything else that grows with the steps goes to disk as it comes.
        self._losses = array("d")

    def run(self) -> None:
        """Run all steps and write what they left."""
        torch.set_num_threads(threads_of_a_rank(len(self._plan.devices)))
        # Loaded before the ranks agree on the start: models take their time.
        model = self._load_model() if self._orders.compute == "real" else None
        self._connect()
        local_delivery_s = 0.0
        if self._orders.emulator == "shaper":
            local_delivery_s = measure_local_delivery_s(self._rank, len(self._plan.devices))
        groups = _connections(self._plan.connections)
        where = compute_device(self._scenario.cluster.by_name[self._device].kind, self._orders.compute)
        group = self._tensor_group(where) if model else None
        clock = _agree_on_clock(self._rank, self._job, self._scenario.cluster, self._head_start_s)
        trained = self._trained(model, clock, where, group) if model else None
        shaper = None
        if self._orders.emulator == "shaper":
            shaper = LinkShaper(self._job.ledger, self._scenario.cluster, clock, local_delivery_s)
        ranks = {device: rank for rank, device in enumerate(self._plan.devices)}
        transport = Transport(
            self._device, ranks, self._scenario.cluster, groups, clock, shaper, self._watches, self._give_up
        )
        rows = self._train(trained or PacedCompute(clock), transport, clock, group)
        transport.close()
        dist.barrier(timeout=_UNTIL_ALL_ARE_DONE)
        if shaper is not None:
            shaper.close()
        rows.close()
        self._write(trained)
        dist.destroy_process_group()

    def _load_model(self) -> LoadedModel:
        """The model, which is the same on all ranks."""
        code, seed, profile = self._scenario.code, self._scenario.training.seed, self._scenario.model
        assert code is not None, "the launcher has checked this"

        def load() -> tuple[LoadedModel, dict[str, str]]:
            model = load_with_sizes(code, seed)
            return model, model_facts(model.sizes, profile)

        return self._handshake.agree("model", load, PATIENCE.total_seconds(), SharedInputError)

    def _connect(self) -> None:
        store, ranks = self._handshake.store, len(self._plan.devices)
        # They end when the others are connected: nobody leaves while somebody else still tries.
        trial = self._handshake.agree(
            "connections", lambda: (try_connections(store, self._rank, ranks), {}), 2 * CONNECT_S
        )
        connect(store, self._rank, ranks, PATIENCE)
        del trial

    def _trained(
        self, model: LoadedModel, clock: RunClock, where: torch.device, group: RankGroup | None
    ) -> RealCompute:
        training = self._scenario.training
        kind = NoiseMeasuringCompute if training.noise_scale else RealCompute
        return kind(model, self._plan, self._program(self._plan), training, clock, where, group)

    def _program(self, plan: Plan) -> DeviceProgram:
        program = device_program(plan, self._scenario, self._device)
        if self._orders.compute == "real" or self._leads:
            return program
        # In paced compute the first device of a group spends the time, and moves the bytes, of all of it.
        return replace(program, work=(), synchronisations=(), update_s=0.0)

    @property
    def _leads(self) -> bool:
        """Whether this rank is no partner in a tensor-parallel group."""
        return self._device in compile_plan(self._plan, self._scenario)

    def _tensor_group(self, where: torch.device) -> RankGroup | None:
        if all(device in compile_plan(self._plan, self._scenario) for device in self._plan.devices):
            return None
        # Loading torch's DTensor takes a second or two, which other plans need not wait for.
        from executor.training.tensor_parallel_group import form_group

        return form_group(self._plan, self._device, where.type, PATIENCE)

    def _train(self, compute: Compute, transport: Transport, clock: RunClock, group: RankGroup | None) -> RowLog:
        """Carry out all steps; return where the rows went, since the last sends are still under way."""
        steps, feed = self._orders.steps, None
        if self._orders.adapts:
            feed = PlanFeed(store_address(), self._rank, self._plan, steps, self._give_up)
        source = StepSource(self._program, self._plan, steps, feed)
        log = RowLog if self._leads else PartnerRows
        rows = log(EventWriter(self._job.events(self._rank)), feed)
        samples = SampleFile(self._job.resources(self._rank))

        def end(step: int) -> None:
            if feed is not None:
                feed.finish(step)
            rows.end_step()
            samples.append(sample_resources(step, clock.now_s()))

        interpreter = Interpreter(
            self._scenario,
            transport,
            compute,
            clock,
            self._wire(),
            rows,
            self._updates(transport, compute, clock, rows),
            self._losses.append,
            group,
            end,
        )
        run_steps(source, interpreter, clock)
        samples.close()
        return rows

    @property
    def _watches(self) -> bool:
        """Arrivals show a policy, and the rows of emulated links, what links carry; updates are applied on arrival."""
        updates = self._plan.synchronisation.method != "allreduce"
        return self._orders.adapts or updates or self._orders.emulator == "relay"

    def _wire(self) -> Wire:
        if self._orders.compute == "paced":
            return AsItIs()
        compression = self._plan.compression
        return CheckedWire(AsItIs() if compression == "none" else Compressing(compression, self._scenario.cluster))

    def _updates(self, transport: Transport, compute: Compute, clock: RunClock, rows: RowLog) -> PipelineUpdates | None:
        edges = update_edges(self._plan, self._scenario)
        if not edges:
            return None
        model, steps = self._scenario.model, self._orders.steps
        return PipelineUpdates(self._plan, edges, self._device, steps, transport, compute, model, clock, rows)

    def _write(self, trained: RealCompute | None) -> None:
        self._job.losses(self._rank).write_text(json.dumps(self._losses.tolist()))
        if trained is not None:
            parameters = {name: each.contiguous() for name, each in trained.named_parameters().items()}
            save_file(parameters, self._job.parameters(self._rank))
        if isinstance(trained, NoiseMeasuringCompute):
            write_norms(trained.norms, self._job, self._rank)


def _connections(count: int) -> list[dist.ProcessGroup]:
    """Process groups over all ranks; gloo has a connection between every two of them in each."""
    everybody = dist.group.WORLD
    assert everybody is not None
    return [everybody, *(dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(count - 1))]


def _agree_on_clock(rank: int, job: JobFolder, cluster: Cluster, head_start_s: float) -> RunClock:
    """The clock of the run: rank 0 says when it starts, a little after everyone has heard."""
    # Models take unequal times to load; and the news travels over connections that are warm.
    dist.barrier()
    head_start_s += _HEAD_START_LATENCIES * max((link.latency_s for link in cluster.links), default=0.0)
    origin = torch.tensor([time.monotonic() + head_start_s if rank == 0 else 0.0], dtype=torch.float64)
    dist.broadcast(origin, 0)
    if rank == 0:
        announce_origin(job.origin, origin.item())
    return RunClock(origin.item())
