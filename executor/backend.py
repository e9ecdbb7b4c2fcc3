"""The executor as a backend: the same plan and policy as a simulation, in real processes on this machine."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from executor.control import Controller, open_store
from executor.job import ComputeMode, JobFolder, Orders
from executor.launcher import run_job
from executor.model import check_model
from executor.shaper import create_ledger
from executor.support import check_supported
from planner.adaptation import Adaptation
from planner.backend import RunRecord
from planner.check import check_plan
from planner.events import Event, in_order, read_events
from planner.plan import Plan
from planner.policy import Policy
from planner.scenario import Scenario


class TorchBackend:
    """Runs plans under torchrun, a process per device.

    Args:
        compute: ``real`` trains the scenario's model; ``paced`` moves tensors of the profile's sizes and sleeps
            for its times.
        emulate_wan: Hold messages back as the scenario's links and traces say.
        parameters: Where the trained parameters go, as one safetensors file; None drops them.
    """

    def __init__(self, compute: ComputeMode, *, emulate_wan: bool, parameters: Path | None = None) -> None:
        self._compute: ComputeMode = compute
        self._emulate_wan = emulate_wan
        self._parameters = parameters

    def run(self, scenario: Scenario, plan: Plan, policy: Policy | None, steps: int) -> RunRecord:
        """Run ``steps`` training steps in processes of their own, which have all ended when this returns.

        Raises:
            InputError: The scenario cannot carry out the plan, it asks for what can only be simulated yet, or the model
                does not match its profile.
            RunError: A process failed; says which and why.
        """
        check_plan(plan, scenario)
        check_supported(plan, scenario)
        if self._compute == "real":
            check_model(scenario)
        adaptation = Adaptation(policy, plan, scenario) if policy is not None else None
        store = open_store() if adaptation is not None else None
        controller = None
        if adaptation is not None and store is not None:
            controller = Controller(store, adaptation, len(plan.devices))
        folder = Path(tempfile.mkdtemp(prefix="ropebridge-"))
        try:
            job = JobFolder(folder)
            job.write(
                scenario,
                plan,
                Orders(self._compute, steps, self._emulate_wan, policy is not None, store.port if store else 0),
            )
            create_ledger(job.ledger, scenario.cluster)
            run_job(job, plan.devices, controller.poll if controller is not None else lambda: None)
            decided = controller.decision_events if controller is not None else []
            if self._parameters is not None and self._compute == "real":
                _merge_parameters(job, len(plan.devices), self._parameters)
            return RunRecord(
                self._compute,
                scenario,
                plan,
                tuple(in_order([*_all_events(job, len(plan.devices)), *decided])),
                tuple(adaptation.decisions) if adaptation is not None else (),
                _total_losses([json.loads(job.losses(rank).read_text()) for rank in range(len(plan.devices))]),
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _all_events(job: JobFolder, ranks: int) -> list[Event]:
    return [event for rank in range(ranks) for event in read_events(job.events(rank))]


def _total_losses(parts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The loss of each step: the sum over the ranks that hold part of it."""
    return tuple(sum(step) for step in zip(*(part for part in parts if part), strict=True))


def _merge_parameters(job: JobFolder, ranks: int, target: Path) -> None:
    """One file with every layer once; replicas of a layer hold the same values."""
    merged = {}
    for rank in range(ranks):
        with safe_open(job.parameters(rank), framework="pt") as file:
            merged.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    save_file(merged, target)
