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
from executor.control import PlanFeed
from executor.interpreter import Interpreter, StepProgram
from executor.job import JobFolder
from executor.local_delivery import measure_local_delivery_s
from executor.model import LoadedModel, load_with_sizes
from executor.parent import die_with_parent
from executor.peers import PeerLostError
from executor.real_compute import RealCompute
from executor.shaper import LinkShaper
from executor.transport import Transport
from planner.events import Event, write_events
from planner.plan import Plan
from planner.program import compile_plan
from traces.errors import InputError

# A link may be out for minutes; whoever waits longer than this for a peer gives up.
PATIENCE = timedelta(minutes=30)

# From agreeing on the start of the run to the start: enough for everybody to get ready.
_HEAD_START_S = 0.5


class Worker:
    """Everything that one rank holds."""

    def __init__(self, job: JobFolder, rank: int) -> None:
        self._job = job
        self._rank = rank
        self._scenario, self._plan, self._orders = job.read()
        self._device = self._plan.devices[rank]
        self._events: list[Event] = []
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
        if self._orders.emulate_wan:
            local_delivery_s = measure_local_delivery_s(self._rank, len(self._plan.devices))
        clock = _agree_on_clock(self._rank)
        trained = RealCompute(model, self._plan, program, self._scenario.training, clock) if model else None
        compute: Compute = trained or PacedCompute(clock)
        shaper = None
        if self._orders.emulate_wan:
            shaper = LinkShaper(self._job.ledger, self._scenario.cluster, clock, local_delivery_s)
        ranks = {device: rank for rank, device in enumerate(self._plan.devices)}
        transport = Transport(self._device, ranks, self._scenario.cluster, clock, shaper, self.give_up)
        self._train(compute, transport, clock)
        transport.close()
        dist.barrier()
        if shaper is not None:
            shaper.close()
        self._write(trained)
        dist.destroy_process_group()

    def _load_model(self) -> LoadedModel:
        code, seed = self._scenario.code, self._scenario.training.seed
        assert code is not None, "the launcher has checked this"
        return load_with_sizes(code, seed)

    def _train(
        self,
        compute: Compute,
        transport: Transport,
        clock: RunClock,
    ) -> None:
        steps = self._orders.steps
        feed = None
        if self._orders.adapts:
            feed = PlanFeed(self._orders.control_port, self._rank, self._plan, steps, self.give_up)

        def log(event: Event) -> None:
            self._events.append(event)
            if feed is not None:
                feed.log(event)

        def sending(step: int) -> None:
            if feed is not None:
                feed.sending(step)

        def under(plan: Plan, step: int) -> StepProgram:
            return StepProgram(step, plan, compile_plan(plan, self._scenario)[self._device])

        def program_of(step: int) -> StepProgram | None:
            plan = self._plan if feed is None else feed.known(step)
            return None if step >= steps or plan is None else under(plan, step)

        element_bytes = self._scenario.training.element_bytes
        interpreter = Interpreter(self._device, transport, compute, clock, element_bytes, log, sending)
        for step in range(steps):
            current = program_of(step)
            waited = current is None or step == 0
            if current is None:
                assert feed is not None
                current = under(feed.wait(step), step)
            if step == 0:
                interpreter.post(current)
                clock.sleep_until(0.0)
            loss = interpreter.run(current, program_of, waited=waited)
            if loss is not None:
                self._losses.append(loss)
            if feed is not None:
                feed.finish(step)

    def _write(self, trained: RealCompute | None) -> None:
        write_events(self._events, self._job.events(self._rank))
        self._job.losses(self._rank).write_text(json.dumps(self._losses))
        if trained is not None:
            parameters = {
                f"{trained.first_layer + index}.{name}": parameter.detach().contiguous()
                for index, layer in enumerate(trained.layers)
                for name, parameter in layer.named_parameters()
            }
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


def _agree_on_clock(rank: int) -> RunClock:
    """The clock of the run: rank 0 says when it starts, a little after everyone has heard."""
    origin = torch.tensor([time.monotonic() + _HEAD_START_S if rank == 0 else 0.0], dtype=torch.float64)
    dist.broadcast(origin, 0)
    return RunClock(origin.item())


def main(agent: str, folder: str) -> None:
    """Run this process's rank of the job in ``folder``."""
    die_with_parent(int(agent))
    worker = Worker(JobFolder(Path(folder)), int(os.environ["RANK"]))
    try:
        worker.run()
    except Exception as error:
        worker.give_up(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
