"""One rank of a job, started by torchrun as ``python -m executor.worker AGENT_PID JOB_FOLDER``."""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from executor.clock import RunClock
from executor.compute import Compute, PacedCompute
from executor.control import PlanFeed, store_address
from executor.interpreter import Interpreter
from executor.job import JobFolder
from executor.local_delivery import measure_local_delivery_s
from executor.model import LoadedModel, load_with_sizes
from executor.parent import die_with_parent
from executor.peers import PeerLostError
from executor.real_compute import RealCompute
from executor.resources import ResourceSample, sample_resources, write_samples
from executor.row_log import RowLog
from executor.shaper import LinkShaper
from executor.steps import StepSource, run_steps
from executor.transport import Transport
from executor.updates import PipelineUpdates
from executor.wan.origin import announce_origin
from executor.wan.testbed import enter_device_network
from executor.wire import AsItIs, Compressing, Wire
from planner.cluster import Cluster
from planner.events import EventWriter
from planner.program import compile_plan
from planner.update_exchange import update_edges
from traces.errors import InputError

# A link may be out for minutes; whoever waits longer than this for a peer gives up.
PATIENCE = timedelta(minutes=30)

# From agreeing on the start of the run to the start: enough for everybody to hear of it and get ready.
_HEAD_START_S = 0.5
_HEAD_START_LATENCIES = 8


class Worker:
    """Everything that one rank holds."""

    def __init__(self, job: JobFolder, rank: int) -> None:
        self._job = job
        self._rank = rank
        self._scenario, self._plan, self._orders = job.read()
        self._device = self._plan.devices[rank]
        self._samples: list[ResourceSample] = []
        self._losses: list[float] = []

    def run(self) -> None:
        """Run all steps and write what they left."""
        cores = os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // len(self._plan.devices)))
        dist.init_process_group("gloo", timeout=PATIENCE)
        program = compile_plan(self._plan, self._scenario)[self._device]
        # Loaded before the ranks agree on the start: models take their time.
        model = self._load_model() if self._orders.compute == "real" else None
        local_delivery_s = 0.0
        if self._orders.emulator == "shaper":
            local_delivery_s = measure_local_delivery_s(self._rank, len(self._plan.devices))
        groups = _connections(self._plan.connections)
        clock = _agree_on_clock(self._rank, self._job, self._scenario.cluster)
        trained = RealCompute(model, self._plan, program, self._scenario.training, clock) if model else None
        compute: Compute = trained or PacedCompute(clock)
        shaper = None
        if self._orders.emulator == "shaper":
            shaper = LinkShaper(self._job.ledger, self._scenario.cluster, clock, local_delivery_s)
        ranks = {device: rank for rank, device in enumerate(self._plan.devices)}
        transport = Transport(
            self._device, ranks, self._scenario.cluster, groups, clock, shaper, self._watches, self.give_up
        )
        rows = self._train(compute, transport, clock)
        transport.close()
        dist.barrier()
        if shaper is not None:
            shaper.close()
        rows.close()
        self._write(trained)
        dist.destroy_process_group()

    def _load_model(self) -> LoadedModel:
        code, seed = self._scenario.code, self._scenario.training.seed
        assert code is not None, "the launcher has checked this"
        return load_with_sizes(code, seed)

    def _train(self, compute: Compute, transport: Transport, clock: RunClock) -> RowLog:
        """Carry out all steps; return where the rows went, since the last sends are still under way."""
        steps, feed = self._orders.steps, None
        if self._orders.adapts:
            feed = PlanFeed(store_address(), self._rank, self._plan, steps, self.give_up)
        source = StepSource(self._device, self._scenario, self._plan, steps, feed)
        rows = RowLog(EventWriter(self._job.events(self._rank)), feed)
        interpreter = Interpreter(
            self._scenario,
            transport,
            compute,
            clock,
            self._wire(),
            rows,
            self._updates(transport, compute, clock, rows),
            self._losses.append,
        )

        def finish(step: int) -> None:
            if feed is not None:
                feed.finish(step)
            rows.end_step()
            self._samples.append(sample_resources(step, clock.now_s()))

        run_steps(steps, source.known, source.wait, interpreter, clock, finish)
        return rows

    @property
    def _watches(self) -> bool:
        """Arrivals show a policy, and the rows of emulated links, what links carry; updates are applied on arrival."""
        updates = self._plan.synchronisation.method != "allreduce"
        return self._orders.adapts or updates or self._orders.emulator == "relay"

    def _wire(self) -> Wire:
        if self._orders.compute == "real" and self._plan.compression != "none":
            return Compressing(self._plan.compression, self._scenario.cluster)
        return AsItIs()

    def _updates(self, transport: Transport, compute: Compute, clock: RunClock, rows: RowLog) -> PipelineUpdates | None:
        edges = update_edges(self._plan, self._scenario)
        if not edges:
            return None
        model, steps = self._scenario.model, self._orders.steps
        return PipelineUpdates(self._plan, edges, self._device, steps, transport, compute, model, clock, rows)

    def _write(self, trained: RealCompute | None) -> None:
        write_samples(self._samples, self._job.resources(self._rank))
        self._job.losses(self._rank).write_text(json.dumps(self._losses))
        if trained is not None:
            parameters = {name: each.contiguous() for name, each in trained.named_parameters().items()}
            save_file(parameters, self._job.parameters(self._rank))

    def give_up(self, error: Exception) -> None:
        """Write down why this rank cannot go on, and end it; torchrun then ends the others."""
        report = {
            "time_s": time.monotonic(),
            "device": self._device,
            "message": str(error) or type(error).__name__,
            "lost_peer": isinstance(error, PeerLostError),
            "input": isinstance(error, InputError),
            "traceback": traceback.format_exception(error),
        }
        path = self._job.error(self._rank)
        beside = path.with_suffix(f".{threading.get_ident()}")
        try:
            beside.write_text(json.dumps(report))
            # Of several threads that give up, the first one's reason stays.
            with contextlib.suppress(FileExistsError):
                os.link(beside, path)
        finally:
            os._exit(1)


def _connections(count: int) -> list[dist.ProcessGroup]:
    """Process groups over all ranks; gloo has a connection between every two of them in each."""
    everybody = dist.group.WORLD
    assert everybody is not None
    return [everybody, *(dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(count - 1))]


def _agree_on_clock(rank: int, job: JobFolder, cluster: Cluster) -> RunClock:
    """The clock of the run: rank 0 says when it starts, a little after everyone has heard."""
    # Models take unequal times to load; and the news travels over connections that are warm.
    dist.barrier()
    head_start_s = _HEAD_START_S + _HEAD_START_LATENCIES * max((link.latency_s for link in cluster.links), default=0.0)
    origin = torch.tensor([time.monotonic() + head_start_s if rank == 0 else 0.0], dtype=torch.float64)
    dist.broadcast(origin, 0)
    if rank == 0:
        announce_origin(job.origin, origin.item())
    return RunClock(origin.item())


def main(agent: str, folder: str) -> None:
    """Run this process's rank of the job in ``folder``."""
    die_with_parent(int(agent))
    enter_device_network()
    worker = Worker(JobFolder(Path(folder)), int(os.environ["RANK"]))
    try:
        worker.run()
    except Exception as error:
        worker.give_up(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
