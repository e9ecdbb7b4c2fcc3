"""What the ranks of a run must have in common: versions, scenario, plan and orders, and the shapes of the model."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import torch

from executor.core.job import JobFolder, RunConfig
from executor.core.rank_devices import rank_devices
from executor.training.models.loading import LayerSize, compare_sizes
from planner.files.plan import plan_json
from planner.plan.plan import Plan
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from traces.common.errors import RunError

# Of a SHA-256: enough to tell two files apart.
_DIGITS = 12

Job = tuple[Scenario, Plan, RunConfig]


def job_facts(folder: JobFolder, job: Job) -> dict[str, str]:
    """Return what must be the same on all ranks before any of them loads a model."""
    scenario, plan, orders = job
    facts = {
        "ropebridge": _ropebridge_version(),
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "scenario": _digest(_resolved(folder)),
        "plan": _digest(plan_json(plan)),
        **{name: str(value) for name, value in asdict(orders).items()},
    }
    if scenario.code is not None and orders.compute == "real":
        facts["model file"] = _digest(scenario.code.path.read_text())
    return facts


def check_ranks(job: Job, ranks: int) -> None:
    """Refuse a job for another number of devices than there are ranks.

    Raises:
        RunError: Says both.
    """
    devices = len(rank_devices(*job))
    if devices != ranks:
        raise RunError(f"the plan is for {devices} devices, and {ranks} ranks were started")


def model_facts(sizes: Sequence[LayerSize], profile: ModelProfile) -> dict[str, str]:
    """Return what must be the same of the model on all ranks: each layer's parameters and output.

    Raises:
        InputError: A layer is not what the profile says, by which the plan was made.
    """
    compare_sizes(profile, sizes)
    return {f"layer {index}": _layer_facts(size) for index, size in enumerate(sizes)}


def _layer_facts(size: LayerSize) -> str:
    shape, dtype = list(size.output.sizes), str(size.output.dtype).removeprefix("torch.")
    return f"{shape} {dtype} per sample, {size.parameter_bytes} bytes of parameters"


def _ropebridge_version() -> str:
    try:
        return version("ropebridge")
    except PackageNotFoundError:
        return "not installed"


def _resolved(folder: JobFolder) -> str:
    """The scenario without where the model's file is, which may be elsewhere on each host."""
    data = json.loads((folder.path / "scenario.json").read_text())
    if data["code"] is not None:
        del data["code"]["path"]
    return json.dumps(data, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
