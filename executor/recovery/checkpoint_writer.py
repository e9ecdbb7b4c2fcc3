"""Writes a rank's part of each checkpoint: every few steps the rank copies its layers, and a thread writes the copy."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import nn

from executor.core.job import RunConfig
from executor.core.step_program import StepProgram
from executor.recovery.backups import OuterStates, one_layer
from executor.recovery.checkpoint_file import LayerTensors, Part, Share, with_outer
from executor.recovery.checkpoints import CheckpointFolder
from executor.recovery.finite import check_state
from executor.training.flat_state import named_state, sharded_dimensions
from executor.training.real_compute import Compute
from planner.files.plan import plan_json
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario


class LauncherRows(Protocol):
    """What the launcher has of the rows of this rank's steps."""

    def first_unheard(self) -> float:
        """Return the first published step that the launcher may not have heard; infinity if it has heard all."""
        ...

    def await_heard(self, step: int) -> bool:
        """Wait until the launcher has kept all ranks' rows up to a step; return False if the step is to be repeated."""
        ...


@dataclass(eq=False)
class Checkpointing:
    """Copies and writes the layers of one rank, over all sessions.

    Training waits until the layers are copied, and before that until the previous copy is on disk. So at most one copy
    is in memory, and devices that train together are at most one checkpoint apart.

    Args:
        run: The configuration of the job, with the folder and the interval of checkpoints.
        model: Texts that identify the state of each layer; see `executor.recovery.checkpoint_file.Header`.
        layers: The layers of the whole model, of which the names and shapes of the tensors that a rank writes are used.
        failed: Called in the writing thread with the error if a file cannot be written, or the state is not finite.
        rows: The rows that the launcher has. The newest checkpoints before the first one that it lacks are kept. Where
            it collects rows, a checkpoint is written once it has those of all steps before, so that a run that goes on
            after the launcher's end lacks none.
    """

    _run: RunConfig
    _device: str
    _scenario: Scenario
    _model: tuple[str, ...]
    _layers: Sequence[nn.Module]
    _compute: Compute
    _failed: Callable[[Exception], None]
    _rows: LauncherRows

    def __post_init__(self) -> None:
        self._folder = CheckpointFolder(Path(self._run.checkpoints))
        self._latest: StepProgram | None = None
        self._last_copied: StepProgram | None = None
        # Each part with the folder of its pipeline.
        self._parts: queue.SimpleQueue[tuple[CheckpointFolder, Part]] = queue.SimpleQueue()
        # Held from the copying of a part until it is written.
        self._written = threading.Semaphore()
        threading.Thread(target=self._write, name="checkpoints", daemon=True).start()

    def begin_step(self, current: StepProgram, outer: OuterStates) -> bool:
        """Copy the layers that this rank writes before a step, if a checkpoint is due; return whether one is."""
        self._latest, step = current, current.step
        is_due = step > self._run.first_step and step % self._run.checkpoint_every == 0
        if is_due:
            self._copy(step, current.plan, current.samples_before, outer)
        return is_due

    def copy_marked(self, current: StepProgram, checkpoint: int, outer: OuterStates) -> None:
        """Copy the layers before a step of a worker at its own speed, for the checkpoint with another number."""
        samples_before = checkpoint * current.plan.global_batch
        self._copy(checkpoint, current.plan, samples_before, lambda step: outer(current.step))

    def copy_last(self, steps: int, outer: OuterStates) -> None:
        """Copy the layers after the run's last step, which precedes step ``steps``, unless this was done."""
        last = self._latest
        if last is not None and last.step == steps - 1 and last is not self._last_copied:
            self._last_copied = last
            self._copy(steps, last.plan, last.samples_before + last.plan.global_batch, outer)

    def finish(self) -> None:
        """Wait until all files are written; steps may be done again after that, if ranks are lost at the very end."""
        with self._written:
            pass

    def _copy(self, step: int, plan: Plan, samples_before: int, outer: OuterStates) -> None:
        pipeline, layers, group = written_layers(plan, self._device)
        if not layers:
            return
        self._written.acquire()
        rule, states = self._scenario.training.optimizer.name, outer(step)
        dimensions = {layer: sharded_dimensions(self._layers[layer], rule) for layer in layers}
        share = Share(group.index(self._device), len(group), dimensions)
        tensors: dict[int, LayerTensors] = {}
        for layer in layers:
            row = self._compute.layer_state(one_layer(self._scenario, layer))
            named = named_state(self._layers[layer], rule, row)
            own = {name: each for name, each in named.items() if not share.index or name in dimensions[layer]}
            tensors[layer] = with_outer(own, states.get(layer, {}))
        pipelines = separate_pipelines(plan)
        part = Part(step, plan_json(plan), samples_before, self._model, tensors, share, pipelines)
        self._parts.put((self._folder.of_pipeline(pipeline), part))

    def _write(self) -> None:
        try:
            while True:
                folder, part = self._parts.get()
                if self._is_recorded_before(part.step):
                    self._write_part(folder, part)
                self._written.release()
        except Exception as error:
            self._failed(error)

    def _is_recorded_before(self, step: int) -> bool:
        """Wait for the rows of the steps before ``step``; return False if some are lost, and will be done again."""
        # The record of pipelines at their own speed has only the last attempt.
        return not self._run.publishes or self._run.decoupled or self._rows.await_heard(step - 1)

    def _write_part(self, folder: CheckpointFolder, part: Part) -> None:
        layers = part.layers
        if not self._run.allows_nan:
            buffers = {layer: dict(self._layers[layer].named_buffers()) for layer in layers}
            check_state(layers, buffers, part.step)
        folder.write(self._device, part)
        if 0 in layers and part.share.index == 0:
            run, written = self._run, min(part.step, self._rows.first_unheard())
            kept = run.checkpoints_kept
            self._folder.clear(folder, part.pipelines, run.first_step, written, kept, own_speed=run.decoupled)


def separate_pipelines(plan: Plan) -> int:
    """Return the number of pipelines whose states a checkpoint contains; syncers count as one more."""
    how = plan.synchronisation
    return len(plan.pipelines) + how.is_decoupled if how.has_outer_step else 1


def written_layers(plan: Plan, device: str) -> tuple[int, list[int], tuple[str, ...]]:
    """Return the pipeline and layers whose state a device writes, and the devices that hold them together, itself too.

    Each layer is written by the first device that trains it, or by all devices of the first tensor-parallel group; in
    every pipeline if pipelines meet in outer steps.
    """
    for index, pipeline in enumerate(plan.pipelines[: separate_pipelines(plan)]):
        stages = [stage for stage in pipeline.stages if device in stage.replicas[0].devices]
        if stages:
            return index, [layer for stage in stages for layer in stage.layers], stages[0].replicas[0].devices
    return 0, [], ()
