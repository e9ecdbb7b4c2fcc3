"""Runs a scenario with a plan and a policy in either backend, and describes the run."""

import json
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.runs.folder import new_folder, read_record, summarise, write_record
from planner.adapt.policy import Policy
from planner.files.resolved_scenario import resolved_json
from planner.plan.plan import Plan
from planner.runs.record import Backend, RunRecord
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.registry import checked_policy, make_policy
from traces.common.errors import InputError, shown
from traces.common.units import number_text, parse_duration_s, size_text

if TYPE_CHECKING:
    from executor.core.job import CheckpointConfig

# Number of training steps of a run if neither steps nor a duration is given.
DEFAULT_STEPS = 20

# Most events of a simulation: about 1 GiB in memory, or about 2 GB on the disk and an hour of simulating.
_MOST_ROWS_IN_MEMORY, _MOST_ROWS_ON_DISK = 3_000_000, 100_000_000


def carry_out(
    scenario: Scenario,
    plan: Plan,
    policy: str | Policy | None,
    steps: int,
    output: Path | None,
    make_backend: Callable[[Path | None], Backend],
    complete: Callable[[RunRecord], RunRecord] = lambda record: record,
) -> RunRecord:
    """Run a scenario in a backend, and write the run folder ``output`` unless it is None.

    ``policy`` is an adaptation policy or its name; None keeps the plan. ``make_backend`` takes the folder into which
    the run is being written, or None, and returns the backend; ``complete`` takes the backend's record and returns the
    one to keep.

    Raises:
        InputError: There is no step to carry out.
    """
    _check_steps(steps)
    if isinstance(policy, str):
        name, chosen_policy = policy, make_policy(policy, scenario)
    elif policy is None:
        name, chosen_policy = "none", None
    else:
        name, chosen_policy = str(getattr(policy, "name", type(policy).__name__)), checked_policy(policy)
    with new_folder(output) if output is not None else nullcontext() as folder:
        record = replace(complete(make_backend(folder).run(scenario, plan, chosen_policy, steps)), policy=name)
        if folder is not None:
            write_record(record, folder)
    return record


def carry_out_or_resume(
    scenario: Scenario,
    plan: Plan,
    policy: str | Policy | None,
    steps: int,
    output: Path | None,
    make_backend: Callable[[Path | None], Backend],
    checkpoints: "CheckpointConfig | None",
    tell: Callable[[str], None],
) -> RunRecord:
    """Do the same as `carry_out` for a run with ``checkpoints``, whose record also has what earlier attempts have done.

    If the run has done all steps and written its folder, the folder stays as it is. ``tell`` gets lines about what is
    missing of earlier attempts.

    Raises:
        InputError: There is no step to carry out.
    """
    if checkpoints is None:
        return carry_out(scenario, plan, policy, steps, output, make_backend)
    if checkpoints.first_step == steps and output is not None:
        # A launcher can be killed when it has written everything, and whoever starts it again cannot know that.
        written = _written_before(output, scenario, steps)
        if written is not None:
            return written
    # Simulations do not need the executor.
    from executor.control.record.joined_attempts import finished_record, with_earlier_attempts

    def complete(record: RunRecord) -> RunRecord:
        if not record.events:
            # Earlier attempts have done all steps.
            return finished_record(record, checkpoints, tell)
        return with_earlier_attempts(record, checkpoints.folder, tell)

    return carry_out(scenario, plan, policy, steps, output, make_backend, complete)


def _written_before(output: Path, scenario: Scenario, steps: int) -> RunRecord | None:
    """Return the run in a folder if it has done these steps of this scenario, else None."""
    try:
        record = read_record(output)
    except InputError:
        return None
    # Scenarios are compared as they are written: in memory, one that was read differs in the types of its tables.
    is_same = resolved_json(record.scenario) == resolved_json(scenario)
    return record if is_same and len(record.losses) == steps else None


def bounded(steps: int | None, duration: str | None) -> tuple[int, float]:
    """Return the limits of a simulation: the number of steps, and the simulated time in seconds.

    Without both, a run has `DEFAULT_STEPS` steps; a limit that is not given is too large to take effect.

    Raises:
        InputError: Both are given, or one of them is not above zero.
    """
    if steps is not None:
        _check_steps(steps)
    if duration is None:
        return DEFAULT_STEPS if steps is None else steps, math.inf
    if steps is not None:
        raise InputError("both --steps and --duration are given", valid="give one of them")
    duration_s = parse_duration_s(duration, "--duration")
    if not duration_s > 0:
        raise InputError(f"{duration_s:g} s is not allowed", where="--duration", valid="give more than 0 s")
    return sys.maxsize, duration_s


def _check_steps(steps: int) -> None:
    if not isinstance(steps, Integral) or isinstance(steps, bool) or steps < 1:
        raise InputError(f"{shown(steps)} is not allowed", where="steps", valid="give 1 or more, a whole number")


def check_length(scenario: Scenario, plan: Plan, steps: int, duration_s: float, *, on_disk: bool) -> None:
    """Check that a simulation has no more events than memory or disk hold.

    Args:
        scenario: Scenario of the simulation.
        plan: Plan that is simulated, already checked.
        steps: Limit on the number of steps.
        duration_s: Limit on the simulated time, seconds.
        on_disk: Whether events are written to the disk, instead of kept in memory.

    Raises:
        InputError: There would be too many events.
    """
    rows = 2 * sum(
        len(pipeline.microbatches) * (sum(len(stage.replicas) for stage in pipeline.stages) + len(pipeline.stages) - 1)
        for pipeline in plan.pipelines
    )
    most = _MOST_ROWS_ON_DISK if on_disk else _MOST_ROWS_IN_MEMORY
    if rows * steps <= most:
        return
    # The steps of a duration, at the declared rates of links: an estimate suffices.
    step_s = step_time_s(plan, scenario)
    simulated = min(float(min(steps, sys.maxsize)), duration_s / step_s if step_s > 0 else math.inf)
    if rows * simulated > most:
        raise InputError(
            f"{simulated:.4g} steps of {rows:,} actions and messages make {rows * simulated:.2g} events",
            valid=f"at most {most:,} are possible here: simulate {most // rows:,} steps or fewer",
        )


def present(record: RunRecord, as_json: bool) -> str:
    """Return the summary of a run as JSON, or as a few lines of text."""
    summary = summarise(record)
    if as_json:
        return json.dumps(summary)
    lines, interval_steps = [_describe(summary)], record.plan.synchronisation.interval_steps
    if interval_steps > summary["steps"]:
        lines.append(f"  exchanges    the plan has them after every {interval_steps} steps, more than the run had")
    return "\n".join(lines)


def _describe(summary: dict[str, Any]) -> str:
    policy = summary["policy"]
    lines = [
        f"{summary['backend']} {summary['scenario']} ({summary['strategy']}, {summary['schedule']}), "
        f"{summary['steps']} steps",
        f"  network      {summary['emulator'] or summary['network_effects']}",
        f"  step         {number_text(summary['step_s'])} s (median)",
        f"  throughput   {number_text(summary['samples_per_s'])} samples/s",
        f"  bubble       {number_text(100 * summary['bubble_ratio'])} %",
        f"  WAN traffic  {number_text(summary['wan_bytes'] / 1e6)} MB",
        f"  cost         {number_text(summary['cost_usd'])} USD",
        f"  memory       {size_text(max(summary['peak_memory_bytes'].values()))} on the fullest device",
        f"  decisions    {summary['decisions']}" + (f" of policy {policy}" if policy not in ("", "none") else ""),
    ]
    if interruptions := summary["interruptions"]:
        lost_s = sum(each["end_s"] - each["start_s"] for each in interruptions)
        lines.append(f"  interrupted  {len(interruptions)} x, {number_text(lost_s)} s in all")
    if summary["computed_on"]:
        lines.append(f"  trained on   {summary['computed_on']}, not on the devices of the plan")
    if losses := summary["losses"]:
        first, last = ("not finite" if loss is None else number_text(loss) for loss in (losses[0], losses[-1]))
        lines.append(f"  loss         {first} -> {last}")
    return "\n".join(lines)
