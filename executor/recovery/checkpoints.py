"""The folder of a run's checkpoints: ``step-00000120/DEVICE.safetensors``, with one file per writing device.

A checkpoint is complete when its files together contain every layer and match their checksums
(executor/recovery/checkpoint_file.py). So no marker of completion is needed, and incomplete checkpoints are skipped.
An index beside the files of a complete checkpoint names the file of each tensor, for other programs.

Pipelines that meet in outer steps have different parameters: then the folder ``pipeline-N`` contains the checkpoints of
pipeline N from 1 on, and all of them must be complete. In place of a worker that was away when a checkpoint of workers
at their own speed began, the syncers write a part without its state: so only those are missing that were to be written.
"""

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from executor.recovery.checkpoint_file import (
    DamagedError,
    Header,
    LayerTensors,
    Part,
    files_by_layer,
    read_header,
    read_layer,
    split_outer,
    write_part,
)
from planner.files.plan import parse_plan
from planner.scenario.scenario import WEIGHT_INDEX
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError
from traces.common.locks import lock_file

_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        step: The first step after the checkpoint.
        plan: The plan of the step before, as JSON.
        files: The files of each layer, in the order of the layers: one, or one of each device of a group.
        others: The checkpoints of the pipelines from the second on, if pipelines meet in outer steps.
        has_state: Whether it has more than the state of the outer step.
    """

    step: int
    plan: str
    files: Sequence[Sequence[Path]]
    others: "tuple[Checkpoint, ...]" = ()
    has_state: bool = True

    def of_pipeline(self, pipeline: int) -> "Checkpoint":
        """Return the checkpoint of a pipeline, or with -1 the last; the first one if all have the same parameters."""
        return (self, *self.others)[pipeline if pipeline <= len(self.others) else 0]

    @property
    def with_state(self) -> "list[tuple[int, Checkpoint]]":
        """The pipelines that have a state, by index: neither syncers nor workers that were away; one at least."""
        return [(index, each) for index, each in enumerate((self, *self.others)) if each.has_state]

    def tensors(self, layer: int) -> LayerTensors:
        """Return the tensors of a layer's state, unsharded; raise `InputError` if a file of them is damaged.

        Their names are those of `executor.training.flat_state.named_state`.
        """
        with _damaged_since():
            return split_outer(read_layer(self.files[layer], layer))[0]

    def outer(self, layer: int) -> LayerTensors:
        """Return a layer's state of the outer step; raise `InputError` if its file is damaged."""
        with _damaged_since():
            return split_outer(read_layer(self.files[layer], layer))[1]


class CheckpointFolder:
    """Reads, writes and removes the checkpoints of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of_pipeline(self, pipeline: int) -> "CheckpointFolder":
        """Return the folder of a pipeline whose parameters are its own; this folder for the first pipeline."""
        return CheckpointFolder(self.path / f"pipeline-{pipeline}") if pipeline else self

    @property
    def others(self) -> "list[CheckpointFolder]":
        """The existing folders of pipelines from the second on."""
        return [CheckpointFolder(each) for each in sorted(self.path.glob("pipeline-*"))]

    @property
    def steps(self) -> list[int]:
        """The steps with checkpoints, complete or not, in increasing order."""
        found = (each.name.removeprefix("step-") for each in self.path.glob("step-*"))
        return sorted(int(number) for number in found if number.isdigit())

    @property
    def data_states(self) -> Path:
        """The folder of states of the data set, from which reading goes on; see `executor.training.data.states`."""
        return self.path / "data"

    def write(self, device: str, part: Part) -> None:
        """Write a device's part of a checkpoint, and with the last part the index; raise `RunError` if it fails."""
        step, model = part.step, part.model
        write_part(self._place(step) / f"{quote(device, safe='')}.safetensors", part)
        # Of devices that write at the same time, the last one finds the files of all.
        with suppress(OSError, DamagedError), lock_file(self._place(step) / _LOCK, waiting=lambda: None):
            alike = (own for own in self._by_plan(step) if _are_same(part.plan, next(iter(own.values())).plan))
            headers = next(alike, {})
            files = files_by_layer(headers)
            if files.keys() == set(range(len(model))):
                text = json.dumps(_index(headers, files), indent=1)
                write_text_atomically(self._place(step) / WEIGHT_INDEX, text + "\n")

    def _headers(self, step: int) -> dict[Path, Header]:
        return {path: read_header(path) for path in self.parts(step)}

    def _by_plan(self, step: int) -> list[dict[Path, Header]]:
        """Return the headers of a step's parts by the plan that wrote them, the newest ones first.

        A run that went back after a loss may write a step again by another plan, on other devices.
        """
        found: list[dict[Path, Header]] = []
        for path, header in self._headers(step).items():
            own = next((each for each in found if _are_same(header.plan, next(iter(each.values())).plan)), None)
            if own is None:
                found.append({path: header})
            else:
                own[path] = header
        return sorted(found, key=lambda each: -max(path.stat().st_mtime_ns for path in each))

    def parts(self, step: int) -> list[Path]:
        """Return the files of a step's checkpoint, sorted by name."""
        return sorted(self._place(step).glob("*.safetensors"))

    def samples_before(self, step: int) -> int:
        """Return the samples of all steps before ``step``; raise `InputError` if its checkpoint cannot be read."""
        with _damaged_since():
            written = self._by_plan(step)
        if not written:
            raise InputError("there is no complete checkpoint", where=str(self._place(step)), valid="resume again")
        return next(iter(written[0].values())).samples_before

    def drop_old(self, first: int, written: float, kept: int, spared: Collection[int | None] = ()) -> None:
        """Remove all but the newest ``kept`` checkpoints up to step ``written``, and those of the steps ``spared``.

        There are checkpoints of later steps if the run has gone back after a loss of ranks; they will be overwritten.

        The checkpoint of the run's first step, ``first``, is kept too: a process that replaces a lost one reads it.
        """
        for step in [step for step in self.steps if step <= written][:-kept]:
            if step != first and step not in spared:
                self.drop(step)

    def clear(
        self, own: "CheckpointFolder", pipelines: int, first: int, written: float, kept: int, *, own_speed: bool
    ) -> None:
        """Remove what no run will go on from of ``own``, the folder of one of so many pipelines.

        As `drop_old` with ``first``, the step ``written`` and ``kept``, but the newest complete one stays.
        At their ``own_speed`` pipelines leave checkpoints out while they are away: these go too.
        """
        own.drop_old(first, self.slowest(pipelines, written), kept, {self.newest_step()})
        for step in self.left_out(pipelines) if own_speed else ():
            own.drop(step)

    def left_out(self, pipelines: int) -> set[int]:
        """Return the steps whose checkpoints are never complete: a pipeline that lacks one has written a later one."""
        written = self._steps_of(pipelines)
        return {
            step
            for step in set.union(*written)
            if any(step not in own for own in written)
            and all(step in own or max(own, default=-1) > step for own in written)
        }

    def _steps_of(self, pipelines: int) -> list[set[int]]:
        return [set(self.of_pipeline(each).steps) for each in range(pipelines)]

    def slowest(self, pipelines: int, step: float) -> float:
        """Return the step, at most ``step``, up to which so many pipelines with own states have written checkpoints."""
        return min([step, *(max(own, default=0) for own in (self._steps_of(pipelines) if pipelines > 1 else ()))])

    def drop(self, step: int) -> None:
        """Remove the checkpoint of a step, which no run may be writing."""
        shutil.rmtree(self._place(step), ignore_errors=True)

    def newest(self, model: tuple[str, ...], tell: Callable[[str], None], most: float = math.inf) -> Checkpoint:
        """Return the newest complete checkpoint up to step ``most``; ``tell`` gets a line for each that is damaged.

        Raises:
            InputError: No checkpoint is complete, or the newest one is of another model.
        """
        for step in [step for step in reversed(self.steps) if step <= most]:
            try:
                found = self._found(step, model)
                for each in (found, *found.others):
                    for layer, files in enumerate(each.files):
                        read_layer(files, layer)
                return found
            except DamagedError as error:
                tell(f"the checkpoint of step {step} is not used: {error}")
        raise InputError(
            "there is no complete checkpoint",
            where=str(self.path),
            valid="name the folder given as '--checkpoint' to an earlier run, or leave out '--resume' to begin anew",
        )

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint with a file for each layer; None if there is none."""
        for step in reversed(self.steps):
            # Others may be removing older ones.
            with suppress(DamagedError, OSError):
                headers = self._headers(step)
                if headers:
                    self._found(step, next(iter(headers.values())).model)
                    return step
        return None

    def of_step(self, step: int, model: tuple[str, ...]) -> Checkpoint:
        """Return the checkpoint of a step, or raise `InputError` if it is incomplete; rows are checked when read."""
        with _damaged_since():
            return self._found(step, model)

    def _place(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _found(self, step: int, model: tuple[str, ...]) -> Checkpoint:
        """Return the newest complete checkpoint of a step, all pipelines of which were written by one plan."""
        for first, pipelines in self._complete(step, model):
            others = [self.of_pipeline(each)._complete(step, model) for each in range(1, pipelines)]
            alike = [next((each for each, _ in own if _are_same(each.plan, first.plan)), None) for own in others]
            if None not in alike:
                return replace(first, others=tuple(each for each in alike if each is not None))
        raise DamagedError("incomplete: its pipelines have different plans")

    def _complete(self, step: int, model: tuple[str, ...]) -> list[tuple[Checkpoint, int]]:
        """Return what each plan has written completely in this folder, newest first, with its number of pipelines."""
        found, missing = [], set(range(len(model)))
        for headers in self._by_plan(step):
            for path, header in headers.items():
                if header.model != model:
                    raise _another_model(path, header.model, model)
            files = files_by_layer(headers)
            missing = min(missing, set(range(len(model))) - set(files), key=len)
            if len(files) == len(model):
                last = next(reversed(headers.values()))
                own, has_state = map(files.__getitem__, range(len(model))), any(h.has_state for h in headers.values())
                found.append((Checkpoint(step, last.plan, list(own), has_state=has_state), last.pipelines))
        if not found:
            raise DamagedError(f"incomplete: layers {', '.join(map(str, sorted(missing)))} are missing")
        return found


def _are_same(plan: str, other: str) -> bool:
    """Return whether two texts are of one plan."""
    return plan == other or parse_plan(plan) == parse_plan(other)


def _index(headers: Mapping[Path, Header], files: Mapping[int, Sequence[Path]]) -> dict[str, Any]:
    """Return the content of the index: the file of each tensor or, of sharded ones, the files and the dimension."""
    whole, sharded = {}, {}
    for layer, (first, *others) in sorted(files.items()):
        header = headers[first]
        dimensions = header.share.dimensions.get(layer, {})
        for name in header.names[layer]:
            if name in dimensions:
                parts = [path.name for path in (first, *others)]
                sharded[f"{layer}.{name}"] = {"dimension": dimensions[name], "files": parts}
            else:
                whole[f"{layer}.{name}"] = first.name
    header = next(iter(headers.values()))
    index = {"metadata": {"step": header.step, "samples": header.samples_before}, "weight_map": whole}
    return index | ({"sharded": sharded} if sharded else {})


@contextmanager
def _damaged_since() -> Iterator[None]:
    """Return a context that turns a `DamagedError` into an `InputError`, for a checkpoint that was complete before."""
    try:
        yield
    except DamagedError as error:
        raise InputError(str(error), valid="resume again: the run then uses the previous complete checkpoint") from None


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
