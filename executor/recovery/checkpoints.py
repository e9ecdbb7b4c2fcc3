"""The folder of a run's checkpoints: ``step-00000120/DEVICE.safetensors``, a file from each device that has part of it.

A checkpoint is whole when its files together have every layer, and each file shows that it is as it was written
(executor/recovery/checkpoint_file.py). So nobody has to say that one is finished, and what is half-written is passed
over.
"""

import fcntl
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from urllib.parse import quote

import torch

from executor.core.timeouts import timeouts
from executor.recovery.checkpoint_file import DamagedError, Header, read_header, read_row, write_part
from executor.training.flat_state import model_state
from executor.training.models.loading import check_model
from planner.files.plan import parse_plan
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError

# The newest may be under way, the one before it damaged, and devices that train together are at most one apart.
_KEPT = 4

_LOCK, _MARK = "lock", "mark"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is whole.

    Attributes:
        step: The first step that has not been done.
        plan: The plan that the run had, as JSON.
        files: The file of each layer, in the order of the layers.
    """

    step: int
    plan: str
    files: Sequence[Path]

    def row(self, layer: int) -> torch.Tensor:
        """Return the state of a layer.

        Raises:
            InputError: Its file has been damaged since it was looked at.
        """
        with _damaged_since():
            return read_row(self.files[layer], layer)


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def steps(self) -> list[int]:
        """The steps of which there are files, in rising order."""
        found = (each.name.removeprefix("step-") for each in self.path.glob("step-*"))
        return sorted(int(number) for number in found if number.isdigit())

    def write(self, device: str, step: int, plan: str, model: tuple[str, ...], rows: dict[int, torch.Tensor]) -> None:
        """Write a device's part of a checkpoint; see `write_part`."""
        write_part(self._place(step) / f"{quote(device, safe='')}.safetensors", step, plan, model, rows)

    def parts(self, step: int) -> list[Path]:
        """Return the files that there are of a step, by device."""
        return sorted(self._place(step).glob("*.safetensors"))

    def drop_old(self, first: int, written: int) -> None:
        """Remove the checkpoints before those that are needed once this device has written its part of one.

        Later ones may exist: a run that has lost ranks and their copies goes back. They are left to be written again,
        and other devices may still write the checkpoint before this one.

        Args:
            first: The step that the run began with, which processes that come later read; it stays.
            written: The step of the checkpoint that this device has written.
        """
        for step in [step for step in self.steps if step <= written][:-_KEPT]:
            if step != first:
                shutil.rmtree(self._place(step), ignore_errors=True)

    def newest(self, model: tuple[str, ...], tell: Callable[[str], None]) -> Checkpoint:
        """Return the newest whole checkpoint of a model; ``tell`` is called with a line for each that is passed over.

        Raises:
            InputError: There is none, or the newest one is of another model.
        """
        for step in reversed(self.steps):
            try:
                found = self._found(step, model)
                for layer, path in enumerate(found.files):
                    read_row(path, layer)
                return found
            except DamagedError as error:
                tell(f"the checkpoint of step {step} is not used: {error}")
        raise InputError(
            "there is no whole checkpoint",
            where=str(self.path),
            valid="name the folder that '--checkpoint' had, or start anew without '--resume'",
        )

    def of_step(self, step: int, model: tuple[str, ...]) -> Checkpoint:
        """Return the checkpoint of a step; each row is checked when it is read.

        Raises:
            InputError: It is not whole.
        """
        with _damaged_since():
            return self._found(step, model)

    @contextmanager
    def held(self) -> Iterator[str]:
        """Keep other runs from writing here until this one ends, however it does.

        Yields:
            A mark by which `check_held` knows this folder.

        Raises:
            InputError: One does already, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / _LOCK).open("wb")
        except OSError as error:
            raise InputError(
                f"no checkpoints can be written: {error.strerror}",
                where=str(self.path),
                valid="choose a place that can",
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    "another run writes its checkpoints here", where=str(self.path), valid="choose another folder"
                ) from None
            mark = token_hex(8)
            write_text_atomically(self.path / _MARK, mark)
            yield mark

    def check_held(self, mark: str) -> None:
        """Refuse to write where the run's launcher, which has the mark from `held`, does not see it.

        Raises:
            InputError: This is another folder of the same name, or there is none.
        """
        limits = timeouts()
        until_s = time.monotonic() + limits.shared_folder_s
        while self._mark() != mark:
            if time.monotonic() > until_s:
                raise InputError(
                    "this folder for checkpoints is not the one that the head has",
                    where=f"{self.path} on {socket.gethostname()}",
                    valid="give '--checkpoint' a folder that all hosts share, or leave it out",
                )
            time.sleep(limits.shared_folder_retry_s)

    def _mark(self) -> str:
        try:
            return (self.path / _MARK).read_text()
        except OSError:
            return ""

    def _place(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _found(self, step: int, model: tuple[str, ...]) -> Checkpoint:
        files: dict[int, Path] = {}
        header: Header | None = None
        for path in self.parts(step):
            header = read_header(path)
            if header.model != model:
                raise _another_model(path, header.model, model)
            files |= dict.fromkeys(header.digests, path)
        missing = sorted(set(range(len(model))) - set(files))
        if header is None or missing:
            raise DamagedError(f"it lacks layer {', '.join(map(str, missing))}")
        return Checkpoint(step, header.plan, [files[layer] for layer in range(len(model))])


@contextmanager
def _damaged_since() -> Iterator[None]:
    """Around reading what was whole when the launcher looked at it."""
    try:
        yield
    except DamagedError as error:
        raise InputError(str(error), valid="resume again: the checkpoint before it is used") from None


def _another_model(path: Path, there: tuple[str, ...], wanted: tuple[str, ...]) -> InputError:
    if len(there) != len(wanted):
        unlike = f"{len(there)} layers instead of {len(wanted)}"
    else:
        layer = next(index for index, (one, other) in enumerate(zip(there, wanted, strict=True)) if one != other)
        unlike = f"layer {layer} has {there[layer]}, and here {wanted[layer]}"
    return InputError(
        f"this checkpoint is of another model: {unlike}",
        where=str(path),
        valid="resume with the scenario that the run had, or choose another folder",
    )


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where and how often a run writes checkpoints.

    Attributes:
        interval_steps: Steps from one checkpoint to the next.
        first_step: The first step of the run: that of the checkpoint from which it goes on, or 0.
    """

    folder: Path
    interval_steps: int
    first_step: int = 0


def resumption(folder: Path, scenario: Scenario, steps: int, tell: Callable[[str], None]) -> tuple[int, Plan]:
    """Return with which step a run goes on, and the plan that it had.

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
        InputError: There are checkpoints in the folder.
    """
    if CheckpointFolder(folder).steps:
        raise InputError(
            "there are checkpoints here already",
            where=str(folder),
            valid="go on from them with '--resume', or choose another folder",
        )
