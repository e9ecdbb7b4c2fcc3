"""One rank of a job; an agent forks a process for it, which calls `main`."""

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from executor.core.clock import HeadClock, announce_origin
from executor.core.failures import blaming, give_up, rank_name
from executor.core.job import JobFolder, rank_devices
from executor.core.liveness import start_beating
from executor.core.messages import SessionSpec
from executor.core.step_program import compile_plan
from executor.core.subprocesses import die_with_parent, end_sleeps_in_time, short_path
from executor.core.timeouts import timeouts
from executor.rank.context import RankConfig, RankContext, build_context
from executor.rank.control_client import ControlClient, ControlStore, SessionEndedError
from executor.rank.facts import Job, data_facts, job_facts, model_facts
from executor.rank.handshake import Facts
from executor.rank.session import Session
from executor.rank.syncer import Syncer
from executor.recovery.claim import check_held
from executor.runtime.decoupled.updates import AWAY, OWN_STEP
from executor.training.device import (
    check_gpu_memory,
    check_gpus,
    device_name,
    gpu_names,
    gpus_of_ranks,
    is_kind,
    keep_freed_memory,
    other_kind,
    threads_of_a_rank,
)
from executor.training.models.loading import (
    LoadedModel,
    check_loaded,
    load_meta_device,
    load_transformers,
    load_with_sizes,
)
from executor.training.noise_scale import NoiseMeasuringCompute, write_norms
from executor.training.parallel_layout import check_layouts
from executor.transport.device_pairs import check_nccl
from executor.transport.link_shaper import measure_local_delivery_s
from executor.transport.rendezvous import ProcessGroups, check_interface, connect
from executor.wan.testbed import enter_device_network
from planner.adapt.copies import layers_of
from planner.cost.device_speed import jitter_factors
from planner.scenario.datasheet import DATASHEET
from planner.scenario.scenario import HuggingFaceCode, code_to_train
from planner.systems.user_code import without_exit
from traces.common.errors import InputError, RunError

# Timeout of the barrier at the end: other ranks may train for hours. The loss of a peer ends the barrier in seconds.
_UNTIL_ALL_ARE_DONE = timedelta(days=365)

# From the agreement to second 0 pass this many times the longest link latency, so that all ranks know second 0 in time.
_HEAD_START_LATENCIES = 8


def preload(job: JobFolder) -> None:
    """Load the modules that every rank forked from this process needs, which halves the time of a rank's start."""
    scenario, plan, config = job.read()
    # Loads the compiled code of numba too.
    compile_plan(plan, scenario)
    if scenario.effects.compute.jitter:
        # Loads scipy.
        jitter_factors(0, 0, 1, 0.0)
    if config.compute == "real":
        load_meta_device()
        if isinstance(scenario.code, HuggingFaceCode):
            # If it is missing, the ranks say so.
            with suppress(InputError):
                load_transformers(scenario.code.config["model_type"])


def main(agent: str, folder: str) -> None:
    """Run this process's rank of the job in ``folder``."""
    client = join_job(agent, folder)
    run_rank(client, JobFolder(Path(folder)), int(os.environ["WORLD_SIZE"]))
    # All files are closed. Skip the interpreter's clean-up, during which threads of torch may abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def join_job(agent: str, folder: str) -> ControlClient:
    """Connect this process as a rank to the head; from now on the process ends with its agent."""
    die_with_parent(int(agent))
    # Temporary files of this process, and of those that load its data, are removed with the job's folder.
    tempfile.tempdir = short_path(folder)
    end_sleeps_in_time()
    keep_freed_memory()
    enter_device_network()
    job, rank = JobFolder(Path(folder)), int(os.environ["RANK"])
    start_beating(job.path, rank)
    name = rank_name(rank, _device(job, rank))
    with _saying_why(partial(give_up, job, rank, name)):
        return ControlClient(job, rank, name)


def run_rank(
    client: ControlClient, job: JobFolder, ranks: int, *, scope: str = "", head_start_s: float | None = None
) -> None:
    """Run one rank of a job, from the agreement with the other ranks to its result files; on an error end the process.

    Args:
        client: The connection to the head.
        job: The folder of the job.
        ranks: Number of the job's ranks.
        scope: Prefix of the topics of agreements, for a process that runs several jobs.
        head_start_s: Time from the agreement on second 0 to second 0; None for `Timeouts.head_start_s`. With a shorter
            time the first events may be late.
    """
    end = partial(give_up, job, client.rank, client.name)
    head_start_s = timeouts().head_start_s if head_start_s is None else head_start_s
    with _saying_why(end):
        Rank(client, job, ranks, scope, end, head_start_s).run()


class Rank:
    """Runs one rank of one job, over all its sessions."""

    def __init__(
        self,
        client: ControlClient,
        job: JobFolder,
        ranks: int,
        scope: str,
        give_up: Callable[[Exception], None],
        head_start_s: float,
    ) -> None:
        self._client = client
        # Torch holds no reference to a store written in Python.
        self._store = ControlStore(client)
        self._folder = job
        self._ranks = ranks
        self._scope = scope
        self._give_up = give_up
        self._head_start_s = head_start_s
        limits = timeouts()
        self._arrival_s = limits.arrival_s + limits.arrival_per_rank_s * ranks
        # Ranks take unequal times to load their models.
        self._loading_s = max(limits.recv_s, self._arrival_s)
        torch.set_num_threads(threads_of_a_rank(int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))

    def run(self) -> None:
        """Run all steps together with the other ranks, and write the result files."""
        client = self._client
        agreed = client.agree(f"{self._scope}job", self._ranks, self._read, self._arrival_s)
        devices = rank_devices(*agreed.value)
        if len(devices) != self._ranks:
            raise RunError(
                f"the plan is for {len(devices)} devices, but {self._ranks} ranks were started: it needs one each"
            )
        config = self._config = RankConfig(self._folder, client.rank, *agreed.value, devices)
        # Load the model before the ranks agree on the start of the run, since this takes long.
        model = self._load_model() if config.run.compute == "real" else None
        if config.run.checkpoints:
            self._check_checkpoints()
        self._head_clock = HeadClock(client.ask_clock if client.is_remote else None)
        build = partial(build_context, config, model, self._give_up, client)
        spec: SessionSpec | None
        groups: ProcessGroups | None = None
        if config.takes_outer_steps:
            self._take_outer_steps(build, model)
            return
        if config.run.replaces:
            self._context = build(is_connected=False)
            tensors = [named for outer in self._context.outer.values() for named in outer.items()]
            steps = {name: int(step) for name, step in tensors if name in (OWN_STEP, AWAY)}
            own_step = max(steps.values(), default=config.run.first_step)
            client.send("ready", own_step=own_step, was_away=AWAY in steps)
            spec = client.await_session()
        else:
            spec = SessionSpec.of_run(config.plan, self._ranks, config.run, agreed.token)
            client.begin(spec)
            groups = self._connect(spec)
            self._context = build(is_connected=True)
        while spec is not None:
            session = self._session(spec, groups)
            groups = None
            try:
                session.run(self._conclude)
                break
            except SessionEndedError:
                session.leave()
            del session
            # An error and its traceback form a cycle, which keeps the session's connections alive until a collection.
            gc.collect()
            spec = client.await_session()
        self._close()

    def _take_outer_steps(self, build: Callable[..., RankContext], model: LoadedModel | None) -> None:
        """Take outer steps until the end of the run, and write the common parameters."""
        config, client = self._config, self._client
        self._context = build(is_connected=False)
        syncer = Syncer(config, self._context, model, client, self._give_up)
        client.send("serves", address=syncer.address)
        client.send("ready")
        spec = client.await_session()
        assert spec is not None
        assert spec.origin_s is not None
        self._start_clock(spec.origin_s, spec.local_delivery_s)
        syncer.serve()
        if model is not None:
            save_file(syncer.parameters(), self._folder.of_rank("parameters", config.rank))
        client.send("done", session=spec.number, rows=None)
        client.outcome()
        self._close()

    def _session(self, spec: SessionSpec, groups: ProcessGroups | None) -> Session:
        if spec.origin_s is not None and not self._context.clock.has_started:
            self._start_clock(spec.origin_s, spec.local_delivery_s)
        connected = (lambda: self._connect(spec)) if groups is None else (lambda: groups)
        start = partial(self._agree_on_start, spec)
        return Session(self._config, self._context, self._client, spec, connected, start, self._give_up)

    def _connect(self, spec: SessionSpec) -> ProcessGroups:
        place, ranks = spec.ranks.index(self._client.rank), len(spec.ranks)
        connect(self._store, place, ranks, spec.store_prefix)
        return ProcessGroups(spec.plans[0].plan.connections)

    def _agree_on_start(self, spec: SessionSpec) -> None:
        """Agree with all ranks on second 0 of the run by the head's clock, and start this rank's clock."""
        config, client = self._config, self._client
        local_delivery_s = 0.0
        if config.run.emulator == "shaper":
            local_delivery_s = measure_local_delivery_s(config.rank, self._ranks)
        topic = f"{self._scope}start-{spec.number}"
        agreed = client.agree(topic, self._ranks, lambda: (None, {}), self._loading_s)
        latency_s = max((link.latency_s for link in config.scenario.cluster.links), default=0.0)
        origin_s = agreed.now_s + self._head_start_s + _HEAD_START_LATENCIES * latency_s
        self._start_clock(origin_s, local_delivery_s)
        client.outlives_head = config.run.outlives_launcher
        if config.rank == 0:
            client.send("origin", origin_s=origin_s, local_delivery_s=local_delivery_s)
            if not config.run.spread:
                announce_origin(self._folder.origin, origin_s)

    def _start_clock(self, origin_s: float, local_delivery_s: float) -> None:
        clock, shaper = self._context.clock, self._context.shaper
        clock.start(origin_s - self._head_clock.offset_s)
        self._head_clock.lead(clock)
        if shaper is not None:
            shaper.local_delivery_s = local_delivery_s

    def _read(self) -> tuple[Job, Facts]:
        check_interface()
        given = self._folder.read()
        return given, job_facts(self._folder, given)

    def _load_model(self) -> LoadedModel:
        scenario = self._config.scenario
        code, training = code_to_train(scenario), scenario.training
        own: Collection[int] = layers_of(self._config.plan, self._config.device)
        if self._config.takes_outer_steps:
            own = range(len(scenario.model.layers))
        elif self._config.is_grouped and isinstance(code, HuggingFaceCode):
            # A layer gets memory when the group shards it.
            own = ()

        def load() -> tuple[LoadedModel, Facts]:
            """Return the model, which the launcher has not seen: it does not load torch."""
            model = load_with_sizes(code, training.seed, training.precision, training.data, own)
            check_loaded(model, code, scenario)
            check_layouts(scenario, self._config.plan, model)
            if not self._config.takes_outer_steps:
                self._check_device()
            return model, model_facts(model.sizes) | data_facts(training.data)

        return self._client.agree(f"{self._scope}model", self._ranks, load, self._loading_s, wrong_input=True).value

    def _check_device(self) -> None:
        """Raise if this host lacks GPUs, or if this rank's device is of another kind than the scenario gives.

        With ``--on-this-device`` the rank computes all the same, and writes the name of such a device to a file.
        """
        config, names = self._config, gpu_names()
        kinds = [device.kind for device in config.on_host]
        kind, name = kinds[config.place], device_name(kinds, config.place, names)
        strict = not config.run.on_this_device
        if strict and names:
            check_gpus(config.on_host, names)
        if not is_kind(kind, name):
            if strict:
                raise other_kind(kind, name)
            self._folder.of_rank("device", config.rank).write_text(name)
        if strict and (index := gpus_of_ranks(kinds, names)[config.place]) is not None and kind in DATASHEET:
            # A user's own kind may be any device, and NCCL is for kinds of the datasheet.
            check_gpu_memory(config.on_host[config.place], name, torch.cuda.get_device_properties(index).total_memory)
            check_nccl(config.plan, config.scenario, config.device, is_available=dist.is_nccl_available())

    def _check_checkpoints(self) -> None:
        """Raise if the folder of checkpoints is not the same one on all hosts."""
        run = self._config.run

        def check() -> tuple[None, Facts]:
            check_held(Path(run.checkpoints), run.checkpoints_mark)
            return None, {}

        wait_s = timeouts().shared_folder_s + timeouts().connect_s
        self._client.agree(f"{self._scope}checkpoints", self._ranks, check, wait_s, wrong_input=True)

    def _conclude(self) -> None:
        """Write the rank's result files: parameters, norms of gradients."""
        rank, folder, context = self._config.rank, self._folder, self._context
        if not self._config.run.replaces:
            with blaming():
                dist.barrier(timeout=_UNTIL_ALL_ARE_DONE)
        if context.trained is not None:
            parameters = {name: each.contiguous() for name, each in context.trained.named_parameters().items()}
            save_file(parameters, folder.of_rank("parameters", rank))
        if isinstance(context.trained, NoiseMeasuringCompute):
            write_norms(context.trained.norms, folder, rank)

    def _close(self) -> None:
        """Close all files and connections; no step will be repeated any more."""
        context = self._context
        if context.shaper is not None:
            context.shaper.close()
        if context.trained is not None:
            context.trained.close()
        context.samples.close()
        context.losses.close()
        context.file.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._config.run.spread:
            self._client.send_files(self._folder)


@contextmanager
def _saying_why(end: Callable[[BaseException], None]) -> Iterator[None]:
    """Return a context that calls ``end``, which ends this process, with any error, `SystemExit` included.

    Otherwise the rank would end without a message, and the cause would seem to be on other ranks.
    """
    try:
        with without_exit():
            yield
    except BaseException as error:
        end(error)


def _device(job: JobFolder, rank: int) -> str:
    """Return the name of this rank's device for messages; an empty string if it is unknown."""
    try:
        return rank_devices(*job.read())[rank]
    except (InputError, IndexError, OSError, ValueError):
        return ""
