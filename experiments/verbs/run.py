"""Parts of the verb ``ropebridge run``: the backend of a real run, and its checkpoints."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

from executor.backend import TorchBackend
from executor.core.job import CheckpointConfig, ComputeMode
from executor.core.timeouts import timeouts
from executor.validate import check_keeps_state
from experiments.runs.folder import new_folder
from experiments.runs.scenario import Ordering, with_ordering
from planner.check import check_plan
from planner.files.resolved_scenario import read_resolved_scenario
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError, find_by_name

# Default number of steps from one checkpoint to the next.
CHECKPOINT_EVERY = 10

# The file of a run folder with the trained parameters.
PARAMETERS = "parameters.safetensors"


def real_backend(compute: ComputeMode, **options: Any) -> Callable[[Path | None], TorchBackend]:
    """Return a function that takes a run folder, or None, and returns the backend of a real run.

    The backend writes the trained parameters into the folder. ``options`` are further arguments of
    `executor.backend.TorchBackend`.

    Raises:
        InputError: The variable ``ROPEBRIDGE_TIMEOUTS`` is wrong, which the processes of the run would find one by one.
    """
    timeouts()
    find_by_name(compute, dict.fromkeys(get_args(ComputeMode)), "kind of compute", where="compute")

    def make(folder: Path | None) -> TorchBackend:
        parameters = folder / PARAMETERS if folder is not None else None
        return TorchBackend(compute, parameters=parameters, resources=folder, **options)

    return make


def checkpoint_config(
    folder: Path | None,
    every: int | None,
    resume: bool,
    scenario: Scenario,
    steps: int,
    compute: ComputeMode,
    tell: Callable[[str], None],
) -> tuple[CheckpointConfig | None, Plan | None]:
    """Return where and when a run writes checkpoints, and the plan of the checkpoint from which the run resumes.

    Both are None for a run without checkpoints; the plan is None for a run that starts anew.

    Args:
        folder: The folder of the checkpoints; None writes none.
        every: Number of steps from one checkpoint to the next; None for the default.
        resume: Whether to go on from the newest checkpoint.
        scenario: The scenario that is trained.
        steps: Number of training steps of the whole run, including those before the checkpoint.
        compute: The kind of compute; a paced run has no checkpoints.
        tell: Called with lines about the progress.

    Raises:
        InputError: An option is given without another one that it needs or in a paced run, or there is no checkpoint to
            resume from.
    """
    options = {"--checkpoint": folder is not None, "--checkpoint-every": every is not None, "--resume": resume}
    for option in (option for option, given in options.items() if given):
        check_keeps_state(compute, option)
    if folder is None:
        for option, given in options.items():
            if given:
                raise InputError(f"'{option}' needs '--checkpoint'", valid="give the folder of the checkpoints")
        return None, None
    # Loads torch, which paced runs do not need.
    from executor.control.record.joined_attempts import is_recorded
    from executor.recovery.claim import refuse_used, resumption

    every = every or CHECKPOINT_EVERY
    if not resume:
        refuse_used(folder)
        return CheckpointConfig(folder, every), None
    step, plan = resumption(folder, scenario, steps, tell, partial(is_recorded, folder))
    if step == steps:
        tell(f"the run has done all {steps} steps: its results are taken from its checkpoint and its record")
    else:
        tell(f"resumed from the checkpoint of step {step}")
    return CheckpointConfig(folder, every, step), plan


def export(run: Path, checkpoint: Path | None, output: Path) -> str:
    """Write a run's trained model for transformers into a new folder; return what to print.

    Args:
        run: The run's folder.
        checkpoint: The folder of checkpoints, of which the newest complete one is exported; None for the parameters at
            the end of the run.
        output: The new folder.

    Raises:
        InputError: The run's model cannot be exported, or it has no parameters.
    """
    # Loads torch, which other verbs do not need.
    from executor.recovery.export import checkpoint_parameters, export_model, read_parameters

    scenario = read_resolved_scenario(run / "scenario.json")
    if checkpoint is None:
        what, parameters = "the end of the run", read_parameters(run / PARAMETERS)
    else:
        step, parameters = checkpoint_parameters(checkpoint, scenario)
        what = f"the checkpoint of step {step}"
    with new_folder(output) as folder:
        files = [path.name for path in export_model(scenario, parameters, folder)]
    return f"weights of {what}: {output}: {', '.join(files)}"


def resumed_plan(plan: Plan, scenario: Scenario, ordering: Ordering) -> Plan:
    """Return the plan of a checkpoint, with another order of actions if one is given, for a run that resumes.

    Raises:
        InputError: The scenario has changed since the checkpoint, and the plan no longer fits.
    """
    try:
        check_plan(plan, scenario)
    except InputError as error:
        raise InputError(
            f"the plan of the checkpoint does not fit: {error}", valid="give '--strategy' or '--plan' for another one"
        ) from None
    return with_ordering(plan, scenario, ordering)
