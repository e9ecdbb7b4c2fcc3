"""The backend that runs a plan and a policy in real processes, with the same interface as the simulator."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from executor.control.attachment import Attachment, Survival
from executor.control.launcher import prepared_job, run_job
from executor.control.policy_driver import PolicyDriver
from executor.control.record.arrivals import with_arrivals
from executor.control.record.attempt_folder import AttemptFolder
from executor.control.record.attempts import losses_of_ranks, rows_of_ranks
from executor.control.record.joined_attempts import plans_before
from executor.control.results import faults_of, gather_norms, merge_parameters, other_devices
from executor.core.events import EventRecorder
from executor.core.hosts import Hosts, links_in_the_clear
from executor.core.job import (
    CheckpointConfig,
    ComputeMode,
    Emulator,
    EmulatorChoice,
    JobFolder,
    RunConfig,
    Tcp,
    rank_devices,
)
from executor.validate import check_decision, check_spread, check_supported, too_fast
from executor.wan.linux import read_tcp
from executor.wan.relay import read_report
from executor.wan.testbed import missing
from planner.adapt.adaptation import Adaptation
from planner.adapt.gradient_noise import GradientNorms
from planner.adapt.policy import DECISION_LAG_STEPS, Decision, Policy, measures_unused_links
from planner.check import check_plan
from planner.check.paths import check_traces_last, outlasted_traces
from planner.events.event import Event, EventWriter, in_order, read_event_stream
from planner.plan.plan import Pipeline, Plan
from planner.runs.record import ProgressCallback, RealNetwork, RunRecord
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError, RunError


@dataclass(frozen=True)
class TorchBackend:
    """Runs plans on torch.distributed, with a process for each device.

    Attributes:
        compute: ``real`` trains the scenario's model; ``paced`` sends tensors of the profile's sizes and sleeps for the
            profile's times.
        emulator: How the scenario's links are emulated: ``relay`` delays the packets of real TCP connections,
            ``shaper`` delays messages in the sending process, ``auto`` is the relay if this machine allows it and
            otherwise the shaper, ``none`` leaves the network as it is.
        tcp: TCP settings in the relay's network namespaces; see executor/wan/linux.py.
        parameters: Path of a safetensors file for the trained parameters; None drops them. If pipelines update
            asynchronously, the parameters are those of the highest rank that has the layer.
        resources: Folder for each rank's ``resources-RANK.jsonl``; None drops these files.
        backup_every: Number of steps between two copies of the state, with which the run survives the loss of ranks;
            0 makes no copies, so that the loss of a rank ends the run.
        checkpoints: Folder and interval of checkpoints, and the first step of the run; None writes no checkpoints.
        hosts: The hosts of the job; None for this machine alone. On other hosts the user starts the agents, see
            `executor.control.node_agent.run_member`.
        on_this_device: Whether real compute may use a device of another kind than the scenario gives.
        at_profile_speed: Whether each action of real compute lasts as long as the profile says, where this machine is
            quicker: so that its processes train as the unequal devices of the scenario would.
        allow_nan: Whether a run goes on with a loss or parameters that are not finite.
        survival: How ranks outlive this process, where no rank is replaced and links are not emulated; or the ranks
            that have outlived an earlier launcher of the same run, to follow instead of new ones; None if ranks end
            with this process.
        watch: Called with the progress of each step as soon as all ranks have finished the step.
        tell: Called with a line for the user if the links differ from the request: before a run if ``auto`` does not
            choose the relay or links are faster than the relay, after a run with the remarks of the relay.
    """

    compute: ComputeMode
    _: KW_ONLY
    emulator: EmulatorChoice = "none"
    tcp: Tcp = "wide-area"
    parameters: Path | None = None
    resources: Path | None = None
    backup_every: int = 0
    checkpoints: CheckpointConfig | None = None
    hosts: Hosts | None = None
    on_this_device: bool = False
    at_profile_speed: bool = False
    allow_nan: bool = False
    survival: Survival | Attachment | None = None
    watch: ProgressCallback | None = None
    tell: Callable[[str], None] = lambda _: None

    def run(self, scenario: Scenario, plan: Plan, policy: Policy | None, steps: int) -> RunRecord:
        """Run all training steps up to step ``steps`` in other processes, which have ended on return.

        If the checkpoint from which the run resumes is that of the last step, nothing runs: the parameters are those of
        the checkpoint, and the record has no events (those are in that of
        `executor.control.record.joined_attempts.finished_record`).

        Raises:
            InputError: The scenario cannot carry out the plan or contains effects that only the simulator supports, or
                the model does not match its profile.
            RunError: A process failed; the message names the process and the cause.
        """
        # The launcher of a paced run does not load torch, but its ranks do.
        if find_spec("torch") is None:
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        emulator = choose_emulator(self.emulator, self.tell)
        check_plan(plan, scenario)
        checkpoints = self.checkpoints
        options = {"recovers": self.backup_every > 0, "on_this_device": self.on_this_device}
        check_supported(plan, scenario, self.compute, emulator, checkpoints=checkpoints is not None, **options)
        if emulator != "none" and (self.compute == "paced" or self.at_profile_speed):
            check_traces_last(scenario, plan, steps - (checkpoints.first_step if checkpoints is not None else 0))
        if checkpoints is not None and checkpoints.first_step == steps:
            return self._finished(checkpoints.folder, scenario, plan, emulator)
        if self.hosts is not None:
            check_spread(scenario, emulator)
            self.tell(links_in_the_clear(self.hosts))
        if emulator == "relay" and (fast := too_fast(plan, scenario, self.compute)) is not None:
            self.tell(fast)
        config = self._configure(plan, steps, emulator, policy)
        first_step, first_sample = config.first_step, config.first_sample
        adaptation = None
        if policy is not None:
            began = _first_plan(checkpoints, plan, scenario)
            adaptation = Adaptation(policy, plan, scenario, first_step, first_sample, began, steps)

        def check(decision: Decision) -> None:
            check_decision(decision, scenario=scenario, compute=self.compute, emulator=emulator, **options)

        survives = not config.replaces and emulator == "none" and self.hosts is None
        survival = self.survival if survives else None
        config = replace(config, is_watched=self._is_watched(config, plan), outlives_launcher=survival is not None)
        devices = rank_devices(scenario, plan, config)
        with (
            _recording(config, checkpoints, plan, survival) as config,
            prepared_job(scenario, plan, config, self.hosts, survival) as job,
        ):
            attempt = AttemptFolder(Path(config.attempt)) if config.attempt else None
            if attempt is None and survival is not None:
                attempt = AttemptFolder(job.path)
            published = job.published if attempt is None else attempt.published
            rows = EventRecorder(EventWriter(published), None) if config.publishes else None
            names, watch = scenario.cluster.by_name, self.watch or (lambda _: None)
            driver = PolicyDriver(
                plan, first_step, first_sample, names, adaptation, check, rows, attempt, watch, self.tell, steps
            )
            if isinstance(survival, Attachment) and adaptation is not None and attempt is not None:
                driver.restore(attempt.restore_decisions(job.first_unfinished() + DECISION_LAG_STEPS))
            with _naming_checkpoint(checkpoints):
                run_job(job, devices, driver if config.is_steered else None, survival)
            driver.end()
            network = self._network(job, emulator)
            self._save_files(job, devices, driver.plan_at(steps - 1).plan)
            if rows is not None:
                rows.close()
                events, losses, norms = _published(published, config, driver)
            else:
                events, losses, norms = _left_by_ranks(job, config, plan, range(len(devices)))
            events = in_order([*events, *driver.decision_events, *faults_of(scenario, driver, events)])
            if emulator != "none":
                lasted_s = max((event.end_s for event in events), default=0.0)
                for line in outlasted_traces(scenario, plan, lasted_s):
                    self.tell(line)
            return RunRecord(
                self.compute,
                scenario,
                plan,
                tuple(events),
                tuple(adaptation.decisions) if adaptation is not None else (),
                tuple(losses[step] for step in sorted(losses)),
                norms,
                network,
                other_devices(job, len(devices)),
                first_sample,
            )

    def _configure(self, plan: Plan, steps: int, emulator: Emulator, policy: Policy | None) -> RunConfig:
        config = RunConfig(
            self.compute,
            steps,
            emulator,
            policy is not None,
            self.tcp,
            self.backup_every,
            spread=self.hosts is not None,
            on_this_device=self.on_this_device,
            at_profile_speed=self.at_profile_speed,
            allows_nan=self.allow_nan,
            decoupled=plan.synchronisation.is_decoupled,
            measures_links=measures_unused_links(policy),
        )
        checkpoints = self.checkpoints
        if checkpoints is None:
            return config
        return replace(
            config,
            checkpoints=str(checkpoints.folder.resolve()),
            checkpoint_every=checkpoints.interval_steps,
            checkpoints_kept=checkpoints.kept,
            first_step=checkpoints.first_step,
            first_sample=_first_sample(checkpoints),
        )

    def _is_watched(self, config: RunConfig, plan: Plan) -> bool:
        """Return whether progress is shown; call ``tell`` if that would slow the run down."""
        if self.watch is None or config.is_steered or plan.synchronisation.method == "allreduce":
            return self.watch is not None
        self.tell("no progress is shown, since it would slow down pipelines that do not wait for each other")
        return False

    def _finished(self, checkpoints: Path, scenario: Scenario, plan: Plan, emulator: Emulator) -> RunRecord:
        """Write the parameters of a run that had ended after its last step, and return its record without events."""
        if self.parameters is not None:
            from safetensors.torch import save

            from executor.recovery.export import newest_parameters

            self.parameters.write_bytes(save(newest_parameters(checkpoints, scenario)[1]))
        return RunRecord(self.compute, scenario, plan, (), (), network=RealNetwork(emulator))

    def _save_files(self, job: JobFolder, devices: Sequence[str], last: Plan) -> None:
        """Save the parameters after the ``last`` plan and the ranks' files of resources, as far as they are wanted."""
        if self.parameters is not None and self.compute == "real":
            merge_parameters(job, len(devices), self.parameters, _separate_pipelines(last, devices))
        if self.resources is not None:
            for rank in range(len(devices)):
                if (file := job.of_rank("resources", rank)).exists():
                    shutil.copy(file, self.resources)

    def _network(self, job: JobFolder, emulator: Emulator) -> RealNetwork:
        """Return the network settings of the run; call ``tell`` with each remark in the relay's report."""
        if emulator != "relay":
            return RealNetwork(emulator, read_tcp())
        if not job.relay_report.exists():
            self.tell("the relay ended without a report, so it is not known whether the links were emulated in time")
            return RealNetwork(emulator)
        report = read_report(job.relay_report)
        for remark in report.remarks():
            self.tell(remark)
        return RealNetwork(emulator, report.tcp)


# The events of a run in any order, the loss of each step, and the gradient norms of the steps in order.
_Measured = tuple[list[Event], dict[int, float], tuple[GradientNorms, ...]]


def _published(path: Path, config: RunConfig, driver: PolicyDriver) -> _Measured:
    """Return what ranks have published of each step; ranks that may be lost leave no files of their own."""
    events = read_event_stream(path)
    norms = tuple(driver.norms[step] for step in sorted(driver.norms))
    return with_arrivals(events) if config.decoupled else events, driver.losses, norms


def _left_by_ranks(job: JobFolder, config: RunConfig, plan: Plan, ranks: range) -> _Measured:
    """Return what ranks have written to files of their own."""
    events = rows_of_ranks([job.recorded(config, "events", rank) for rank in ranks], config.sees_arrivals(plan))
    losses = losses_of_ranks([job.recorded(config, "losses", rank) for rank in ranks])
    return events, losses, gather_norms(job, len(ranks))


def _first_sample(checkpoints: CheckpointConfig) -> int:
    """Return the samples of all steps before a run's first step."""
    if not checkpoints.first_step:
        return 0
    from executor.recovery.checkpoints import CheckpointFolder

    return CheckpointFolder(checkpoints.folder).samples_before(checkpoints.first_step)


def _first_plan(checkpoints: CheckpointConfig | None, plan: Plan, scenario: Scenario) -> Plan:
    """Return the first plan of the run that goes on with ``plan``, of those that the scenario can still carry out."""
    if checkpoints is None or not checkpoints.first_step:
        return plan
    found = plan
    for earlier in plans_before(checkpoints, plan):
        try:
            check_plan(earlier, scenario)
        except InputError:
            break
        found = earlier
    return found


def _separate_pipelines(plan: Plan, devices: Sequence[str]) -> Mapping[int, Pipeline]:
    """Return the pipeline of each rank that has parameters of its own, which outer steps move together."""
    if not plan.synchronisation.has_outer_step:
        return {}
    own = {
        replica.device: pipeline
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
    }
    return {rank: own[device] for rank, device in enumerate(devices) if device in own}


@contextmanager
def _recording(
    config: RunConfig, checkpoints: CheckpointConfig | None, plan: Plan, survival: Survival | Attachment | None
) -> Iterator[RunConfig]:
    """Lock the folder of checkpoints, if any, and yield the configuration with its mark and the attempt's folder.

    If ranks have outlived their launcher, their configuration stays.
    """
    if isinstance(survival, Attachment):
        config = survival.job.read_config()
    if checkpoints is None:
        yield config
        return
    from executor.recovery.checkpoints import CheckpointFolder
    from executor.recovery.claim import held

    with held(checkpoints.folder) as mark:
        if isinstance(survival, Attachment):
            yield config
            return
        if not checkpoints.first_step:
            # The data set of a run before, whose checkpoints were removed, may have been another one.
            shutil.rmtree(CheckpointFolder(checkpoints.folder).data_states, ignore_errors=True)
        attempt = AttemptFolder.create(checkpoints, config.first_sample, plan, config.sees_arrivals(plan))
        try:
            yield replace(config, checkpoints_mark=mark, attempt=str(attempt.path))
        except InputError:
            # A run that its ranks have refused leaves nothing.
            attempt.drop_unless_begun()
            raise


@contextmanager
def _naming_checkpoint(checkpoints: CheckpointConfig | None) -> Iterator[None]:
    """Return a context that adds the newest complete checkpoint to a `RunError`; all processes have ended then."""
    try:
        yield
    except RunError as error:
        if checkpoints is not None:
            from executor.recovery.checkpoints import CheckpointFolder

            step = CheckpointFolder(checkpoints.folder).newest_step()
            error.add_note(
                f"last good checkpoint in {checkpoints.folder}: "
                + ("none is complete" if step is None else f"step {step}, from which '--resume' goes on")
            )
        raise


def choose_emulator(choice: EmulatorChoice, tell: Callable[[str], None]) -> Emulator:
    """Return the emulator that this machine can run; call ``tell`` if ``auto`` chooses another one than the relay.

    Raises:
        InputError: ``choice`` is the relay, and this machine cannot run it.
    """
    if choice in ("none", "shaper"):
        return choice
    lack = missing()
    if lack is None:
        return "relay"
    if choice == "relay":
        raise InputError(lack, where="emulator relay", valid="use the emulator 'shaper', which needs none of this")
    tell(f"links are emulated inside the processes, not below TCP: {lack}")
    return "shaper"
