"""How a run claims a folder of checkpoints: it locks the folder, and resumes from what is there or refuses it."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from executor.core.timeouts import timeouts
from executor.recovery.checkpoints import CheckpointFolder
from executor.training.flat_state import model_state
from executor.training.models.loading import check_model
from planner.files.plan import parse_plan
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.atomic import missing_folders, remove_empty, write_text_atomically
from traces.common.errors import InputError
from traces.common.locks import lock_file

_LOCK, _MARK = "lock", "mark"


@contextmanager
def held(folder: Path) -> Iterator[str]:
    """Lock a folder against other runs until the block ends; leave no trace if nothing else is in it then.

    Yields:
        A random mark, also written to the folder, by which `check_held` recognises the folder.

    Raises:
        InputError: Another run holds the lock, or the folder cannot be created.
    """
    missing = missing_folders(folder)
    try:
        with _locked(folder):
            mark = token_hex(8)
            write_text_atomically(folder / _MARK, mark)
            try:
                yield mark
            finally:
                with suppress(OSError):
                    if {each.name for each in folder.iterdir()} <= {_LOCK, _MARK}:
                        (folder / _MARK).unlink(missing_ok=True)
                        (folder / _LOCK).unlink()
    finally:
        remove_empty(missing)


def _locked(folder: Path) -> BinaryIO:
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A run that leaves no trace may remove the folder meanwhile.
            with suppress(FileNotFoundError):
                return lock_file(folder / _LOCK)
        except BlockingIOError:
            raise InputError(
                "another run writes its checkpoints here", where=str(folder), valid="choose another folder"
            ) from None
        except OSError as error:
            raise InputError(
                f"no checkpoints can be written: {error.strerror}",
                where=str(folder),
                valid="a folder that can be created and written to",
            ) from error


def check_held(folder: Path, mark: str) -> None:
    """Raise `InputError` if the ``mark`` of the launcher's `held` does not appear in this folder in time."""
    limits = timeouts()
    until_s = time.monotonic() + limits.shared_folder_s
    while _mark(folder) != mark:
        if time.monotonic() > until_s:
            raise InputError(
                "this folder for checkpoints is not the same folder as on the head",
                where=f"{folder} on {socket.gethostname()}",
                valid="give '--checkpoint' a folder that all hosts share, or leave it out",
            )
        time.sleep(limits.shared_folder_retry_s)


def _mark(folder: Path) -> str:
    try:
        return (folder / _MARK).read_text()
    except OSError:
        return ""


def resumption(
    folder: Path,
    scenario: Scenario,
    steps: int,
    tell: Callable[[str], None],
    is_recorded: Callable[[int], bool] = lambda _: True,
) -> tuple[int, Plan]:
    """Return the step from which a run resumes, and the plan of its newest complete checkpoint.

    The step is ``steps`` if the run has done all and ``is_recorded`` says that its record is whole too. Otherwise the
    last steps are done again, from the checkpoint before.

    Raises:
        InputError: No checkpoint is complete, the newest is of another model, or the run has done more steps.
    """
    layers = check_model(scenario).model.layers
    newest = partial(CheckpointFolder(folder).newest, model_state(layers, scenario.training.optimizer.name), tell)
    found = newest()
    if found.step == steps and not is_recorded(steps):
        tell(f"the run has done {steps} steps, but its record lacks some: these are done again")
        found = newest(steps - 1)
    if found.step > steps:
        raise InputError(
            f"the run has done {found.step} steps", where=str(folder), valid=f"give '--steps' more than {found.step}"
        )
    # Some pipelines may have written later ones, which must not mix with those of the next run.
    every = CheckpointFolder(folder)
    for own in (every, *every.others) if every.others else ():
        for newer in own.steps:
            if newer > found.step:
                own.drop(newer)
    return found.step, parse_plan(found.plan)


def refuse_used(folder: Path) -> None:
    """Raise `InputError` if a folder contains checkpoints: a run from step 0 must not mix with another run."""
    found = CheckpointFolder(folder)
    if found.steps or any(each.steps for each in found.others):
        raise InputError(
            "there are checkpoints here already",
            where=str(folder),
            valid="go on from them with '--resume', or choose another folder",
        )
