"""``ropebridge simulate`` and ``ropebridge run``: the same scenario, plan and policy in either backend."""

import json
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.runs.folder import new_folder, summarise, write_record
from planner.adapt.policy import Policy
from planner.plan.plan import Plan
from planner.runs.record import Backend, RunRecord
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_policy
from traces.common.errors import InputError
from traces.common.units import parse_duration_s

if TYPE_CHECKING:
    from executor.core.job import ComputeMode

# Of a run that is not told how far to go.
DEFAULT_STEPS = 20


def carry_out(
    scenario: Scenario,
    plan: Plan,
    policy: str | Policy | None,
    steps: int,
    output: Path | None,
    make_backend: Callable[[Path | None], Backend],
) -> RunRecord:
    """Run a scenario in a backend and write the run folder if one is asked for.

    Args:
        scenario: What is trained, and where.
        plan: Of the first step.
        policy: An adaptation policy or its name; None keeps the plan.
        steps: Training steps.
        output: The run folder, or None.
        make_backend: Makes the backend, given the folder that is being filled.
    """
    chosen_policy = make_policy(policy, scenario) if isinstance(policy, str) else policy
    with new_folder(output) if output is not None else nullcontext() as folder:
        record = make_backend(folder).run(scenario, plan, chosen_policy, steps)
        if folder is not None:
            write_record(record, folder)
    return record


def real_backend(compute: "ComputeMode", **options: Any) -> Callable[[Path | None], Backend]:
    """Return what makes the backend of a real run, given the run folder: trained parameters go there if there is one.

    Args:
        compute: ``real`` or ``paced``.
        options: Further arguments of `executor.backend.TorchBackend`.
    """
    # Here and not above: simulations do without torch.
    from executor.backend import TorchBackend

    def make(folder: Path | None) -> Backend:
        parameters = folder / "parameters.safetensors" if folder is not None else None
        return TorchBackend(compute, parameters=parameters, resources=folder, **options)

    return make


def bounded(steps: int | None, duration: str | None) -> tuple[int, float]:
    """Return the most steps and seconds that a simulation takes, of which a person gives one.

    Raises:
        InputError: Both are given, or the duration is none.
    """
    if duration is None:
        return steps or DEFAULT_STEPS, math.inf
    if steps is not None:
        raise InputError("both --steps and --duration", valid="give one of them")
    duration_s = parse_duration_s(duration)
    if not duration_s > 0:
        raise InputError(f"a duration of {duration_s:g} s", where="--duration", valid="more than 0 s")
    return sys.maxsize, duration_s


def present(record: RunRecord, as_json: bool) -> str:
    """Return a run's summary, as JSON or for people."""
    summary = summarise(record)
    return json.dumps(summary) if as_json else describe(summary)


def describe(summary: dict[str, Any]) -> str:
    """Return a summary as a few lines for people."""
    lines = [
        f"{summary['backend']} {summary['scenario']} ({summary['strategy']}, {summary['schedule']}), "
        f"{summary['steps']} steps",
        f"  step         {summary['step_s']:.4f} s (median)",
        f"  throughput   {summary['samples_per_s']:.2f} samples/s",
        f"  bubble       {100 * summary['bubble_ratio']:.1f} %",
        f"  WAN traffic  {summary['wan_bytes'] / 1e6:.1f} MB",
        f"  cost         {summary['cost_usd']:.4f} USD",
        f"  memory       {max(summary['peak_memory_bytes'].values()) / 2**30:.2f} GiB on the fullest device",
        f"  decisions    {summary['decisions']}",
    ]
    if summary["losses"]:
        lines.append(f"  loss         {summary['losses'][0]:.4f} -> {summary['losses'][-1]:.4f}")
    return "\n".join(lines)
