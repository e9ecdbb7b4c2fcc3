"""The executor as a backend: the same plan and policy as a simulation, in real processes."""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from executor.control.launcher import prepared_job, run_job
from executor.control.policy_driver import PolicyDriver
from executor.control.send_times import settling
from executor.core.events import EventRecorder
from executor.core.hosts import Hosts
from executor.core.job import ComputeMode, Emulator, EmulatorChoice, JobFolder, RunConfig, Tcp, rank_devices
from executor.recovery.checkpoints import CheckpointConfig, CheckpointFolder
from executor.training.models.loading import check_model
from executor.training.noise_scale import gather_norms
from executor.training.parallel_layout import check_layouts
from executor.validate import check_decision, check_spread, check_supported, too_fast
from executor.wan.report import read_report
from executor.wan.tcp_settings import read_tcp
from executor.wan.testbed import missing
from planner.adapt.adaptation import Adaptation
from planner.adapt.policy import Policy
from planner.check import check_plan
from planner.events.event import Event, EventWriter, fault_events, in_order, read_events
from planner.plan.plan import Plan
from planner.runs.record import RealNetwork, RunRecord, Watch
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError


class TorchBackend:
    """Runs plans on torch.distributed, a process per device.

    Args:
        compute: ``real`` trains the scenario's model; ``paced`` moves tensors of the profile's sizes and sleeps
            for its times.
        emulator: What makes this machine's network behave as the scenario's links and traces say: ``relay`` carries
            the packets of real TCP connections, ``shaper`` holds messages back in the sending process, ``auto`` is
            the relay where this machine allows it and the shaper elsewhere, ``none`` leaves the network as it is.
        tcp: How the relay's hosts are set, see executor/wan/tcp_settings.py.
        parameters: Where the trained parameters go, as one safetensors file; None drops them. Where pipelines do not
            wait for each other's updates it has those of the last one.
        resources: The folder where each rank's ``resources-RANK.jsonl`` goes; None drops them.
        backup_every: Steps between two copies of the state, from which the run goes on when ranks are lost; 0 where it
            ends with that.
        checkpoints: Where the state goes to disk, and with which step the run begins; None writes none.
        hosts: Where the ranks are; None for this machine alone. The agents of other hosts are started there:
            `executor.control.node_agent.run_member`.
        watch: Called with each step as soon as all ranks have finished it, in a run that goes on meanwhile.
        tell: Called with a line for people where the links are not what was asked for: before a run when ``auto`` is
            not the relay or links are faster than it, after it with what the relay has to remark.
    """

    def __init__(
        self,
        compute: ComputeMode,
        *,
        emulator: EmulatorChoice = "none",
        tcp: Tcp = "wide-area",
        parameters: Path | None = None,
        resources: Path | None = None,
        backup_every: int = 0,
        checkpoints: CheckpointConfig | None = None,
        hosts: Hosts | None = None,
        watch: Watch | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._hosts = hosts
        self._watch = watch
        self._compute: ComputeMode = compute
        self._emulator: EmulatorChoice = emulator
        self._tcp: Tcp = tcp
        self._parameters = parameters
        self._resources = resources
        self._backup_every = backup_every
        self._checkpoints = checkpoints
        self._tell = tell

    def run(self, scenario: Scenario, plan: Plan, policy: Policy | None, steps: int) -> RunRecord:
        """Run all training steps up to ``steps`` in processes of their own, which have all ended when this returns.

        Raises:
            InputError: The scenario cannot carry out the plan, it asks for what can only be simulated yet, or the model
                does not match its profile.
            RunError: A process failed; says which and why.
        """
        emulator = choose_emulator(self._emulator, self._tell)
        check_plan(plan, scenario)
        recovers, checkpoints = self._backup_every > 0, self._checkpoints
        supports = partial(check_supported, recovers=recovers, checkpoints=checkpoints is not None)
        supports(plan, scenario, self._compute, emulator)
        if self._hosts is not None:
            check_spread(scenario, emulator)
        if self._compute == "real":
            check_model(scenario)
            check_layouts(scenario, plan)
        if emulator == "relay" and (fast := too_fast(plan, scenario)) is not None:
            self._tell(fast)
        adaptation = Adaptation(policy, plan, scenario) if policy is not None else None
        settle = settling(emulator, scenario.cluster, is_spread=self._hosts is not None)
        check = partial(check_decision, scenario=scenario, compute=self._compute, emulator=emulator, recovers=recovers)
        config = RunConfig(self._compute, steps, emulator, policy is not None, self._tcp, self._backup_every)
        is_watched = self._watch is not None
        if is_watched and not config.is_steered and plan.synchronisation.method != "allreduce":
            self._tell("pipelines that do not wait for each other are not watched: it would hold them back")
            is_watched = False
        config = replace(config, spread=self._hosts is not None, is_watched=is_watched)
        if checkpoints is not None:
            config = replace(
                config,
                checkpoints=str(checkpoints.folder.resolve()),
                checkpoint_every=checkpoints.every,
                first_step=checkpoints.first_step,
            )
        devices = rank_devices(scenario, plan, config)
        held = CheckpointFolder(checkpoints.folder).held() if checkpoints is not None else nullcontext("")
        with held as mark, prepared_job(scenario, plan, replace(config, checkpoints_mark=mark), self._hosts) as job:
            rows = EventRecorder(EventWriter(job.published), None) if config.publishes else None
            take = partial(_write, rows) if rows is not None else _leave
            watch = self._watch or (lambda _: None)
            names = [device.name for device in scenario.cluster.devices]
            driver = PolicyDriver(
                plan, config.first_step, names, adaptation, settle, check, take, watch, self._tell, steps
            )
            run_job(job, devices, driver if config.is_steered else None)
            network = self._network(job, emulator)
            if self._parameters is not None and self._compute == "real":
                _merge_parameters(job, len(devices), self._parameters)
            if self._resources is not None:
                for rank in filter(lambda rank: job.resources(rank).exists(), range(len(devices))):
                    shutil.copy(job.resources(rank), self._resources)
            events = _published(job, rows) if rows is not None else settle(_all_events(job, len(devices)))
            losses = driver.losses if config.publishes else _total_losses(job, len(devices))
            return RunRecord(
                self._compute,
                scenario,
                plan,
                tuple(in_order([*events, *driver.decision_events, *_faults(scenario, driver, events)])),
                tuple(adaptation.decisions) if adaptation is not None else (),
                tuple(losses[step] for step in sorted(losses)),
                gather_norms(job, len(devices)),
                network,
            )

    def _network(self, job: JobFolder, emulator: Emulator) -> RealNetwork:
        """What carried the bytes; says what of it was not as it should be."""
        if emulator != "relay":
            return RealNetwork(emulator, read_tcp())
        if not job.relay_report.exists():
            self._tell("the relay was ended before it could report: how it went is not known")
            return RealNetwork(emulator)
        report = read_report(job.relay_report)
        for remark in report.remarks():
            self._tell(remark)
        return RealNetwork(emulator, report.tcp)


def choose_emulator(choice: EmulatorChoice, tell: Callable[[str], None]) -> Emulator:
    """Return what emulates the links on this machine; ``tell`` is called where ``auto`` is not the relay.

    Raises:
        InputError: The relay is asked for, and this machine cannot run it.
    """
    if choice in ("none", "shaper"):
        return choice
    lack = missing()
    if lack is None:
        return "relay"
    if choice == "relay":
        raise InputError(lack, where="emulator relay", valid="'shaper' does without")
    tell(f"links are emulated inside the processes, not below TCP: {lack}")
    return "shaper"


def _all_events(job: JobFolder, ranks: int) -> list[Event]:
    return [event for rank in range(ranks) for event in read_events(job.events(rank))]


def _total_losses(job: JobFolder, ranks: int) -> dict[int, float]:
    """The loss of each step: the sum over the ranks that hold part of it."""
    total: defaultdict[int, float] = defaultdict(float)
    for rank in range(ranks):
        for step, loss in json.loads(job.losses(rank).read_text()):
            total[step] += loss
    return total


def _faults(scenario: Scenario, driver: PolicyDriver, events: list[Event]) -> list[Event]:
    """Of links those that were emulated, of devices those that were found."""
    end_s = max(event.end_s for event in events)
    outages = [fault for fault in scenario.faults if isinstance(fault, LinkOutage)]
    return [*fault_events(outages, end_s), *driver.absences.events(end_s)]


def _leave(events: list[Event]) -> None:
    """The ranks write their rows themselves."""


def _write(rows: EventRecorder, events: list[Event]) -> None:
    for event in events:
        rows.log(event)
    rows.end_step()


def _published(job: JobFolder, rows: EventRecorder) -> list[Event]:
    rows.close()
    return read_events(job.published)


def _merge_parameters(job: JobFolder, ranks: int, target: Path) -> None:
    """One file with every layer once; replicas of a layer hold the same values, pipelines may not."""
    merged = {}
    # Ranks that were lost, and not needed any more, have left nothing.
    for rank in filter(lambda rank: job.parameters(rank).exists(), range(ranks)):
        with safe_open(job.parameters(rank), framework="pt") as file:
            merged.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    save_file(merged, target)
