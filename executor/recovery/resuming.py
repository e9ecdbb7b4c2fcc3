"""Where a run goes on that has ended: what the launcher looks at before any process is started."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from executor.recovery.checkpoints import CheckpointFolder
from executor.training.layer_state import model_state
from executor.training.models.loading import check_model
from planner.files.plan import parse_plan
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What a run does about checkpoints.

    Attributes:
        folder: Where they are.
        every: Steps from one to the next.
        first_step: Of the run: that of the checkpoint from which it goes on, or 0.
    """

    folder: Path
    every: int
    first_step: int = 0


def resumption(folder: Path, scenario: Scenario, steps: int, tell: Callable[[str], None]) -> tuple[int, Plan]:
    """Return with which step a run goes on, and the plan that it had.

    Args:
        folder: Of its checkpoints.
        scenario: What is trained.
        steps: That the run shall have in all.
        tell: Called with a line for each checkpoint that is damaged, and so not used.

    Raises:
        InputError: No checkpoint is whole, it is of another model, or there is nothing left to do.
    """
    layers = check_model(scenario).model.layers
    found = CheckpointFolder(folder).newest(model_state(layers, scenario.training.optimizer.name), tell)
    if found.step >= steps:
        raise InputError(
            f"the run has done {found.step} steps", where=str(folder), valid=f"give '--steps' more than {found.step}"
        )
    return found.step, parse_plan(found.plan)


def refuse_used(folder: Path) -> None:
    """Refuse a folder with checkpoints for a run that begins anew: it would mix two runs.

    Raises:
        InputError: There are some.
    """
    if CheckpointFolder(folder).steps:
        raise InputError(
            "there are checkpoints here already",
            where=str(folder),
            valid="go on from them with '--resume', or choose another folder",
        )
