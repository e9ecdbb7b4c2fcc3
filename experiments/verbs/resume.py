"""What ``ropebridge run`` is told of checkpoints."""

from collections.abc import Callable
from pathlib import Path

from executor.recovery.checkpoints import CheckpointConfig, refuse_used, resumption
from experiments.runs.scenario import Ordering, with_ordering
from planner.check import check_plan
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError

_DEFAULT_EVERY = 10


def checkpoint_orders(
    folder: Path | None,
    every: int | None,
    resume: bool,
    scenario: Scenario,
    steps: int,
    tell: Callable[[str], None],
) -> tuple[CheckpointConfig | None, Plan | None]:
    """Return what a run does about checkpoints, and the plan of the one from which it goes on.

    Args:
        folder: Of the checkpoints; None for none.
        every: Steps from one to the next; None for the usual number.
        resume: Whether to go on from the newest one.
        scenario: What is trained.
        steps: That the run shall have in all.
        tell: Called with lines for people.

    Raises:
        InputError: An option lacks another one, or there is nothing to go on from.
    """
    if folder is None:
        for given, option in ((every is not None, "--checkpoint-every"), (resume, "--resume")):
            if given:
                raise InputError(f"'{option}' without '--checkpoint'", valid="say in which folder checkpoints are")
        return None, None
    every = every or _DEFAULT_EVERY
    if not resume:
        refuse_used(folder)
        return CheckpointConfig(folder, every), None
    step, plan = resumption(folder, scenario, steps, tell)
    tell(f"resumed from the checkpoint of step {step}")
    return CheckpointConfig(folder, every, step), plan


def resumed_plan(plan: Plan, scenario: Scenario, ordering: Ordering) -> Plan:
    """Return the plan of a checkpoint for a run that nobody gives another one.

    Raises:
        InputError: The scenario has changed, and it does not fit any more.
    """
    try:
        check_plan(plan, scenario)
    except InputError as error:
        raise InputError(
            f"the plan of the checkpoint does not fit: {error}", valid="give '--strategy' or '--plan' for another one"
        ) from None
    return with_ordering(plan, scenario, ordering)
