"""Writes a rank's part of each checkpoint: every few steps the rank copies its layers, and a thread writes the copy."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from executor.core.job import RunConfig
from executor.core.step_program import StepProgram
from executor.recovery.backups import one_layer
from executor.recovery.checkpoint_file import LayerTensors, Share
from executor.recovery.checkpoints import CheckpointFolder
from executor.recovery.finite import check_state
from executor.training.flat_state import named_state, sharded_dimensions
from executor.training.real_compute import Compute
from planner.files.plan import plan_json
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario

# A step, the plan of the step before, the samples of all steps before, this rank's layers, and what it has of them.
_Part = tuple[int, Plan, int, dict[int, LayerTensors], Share]


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
    """

    _run: RunConfig
    _device: str
    _scenario: Scenario
    _model: tuple[str, ...]
    _layers: Sequence[nn.Module]
    _compute: Compute
    _failed: Callable[[Exception], None]

    def __post_init__(self) -> None:
        self._folder = CheckpointFolder(Path(self._run.checkpoints))
        self._latest: StepProgram | None = None
        self._parts: queue.Queue[_Part | None] = queue.Queue(maxsize=1)
        self._written = threading.Semaphore()
        self._thread = threading.Thread(target=self._write, name="checkpoints", daemon=True)
        self._thread.start()

    def begin_step(self, current: StepProgram) -> None:
        """Copy the layers that this rank writes before a step, if a checkpoint is due."""
        self._latest, step = current, current.step
        if step > self._run.first_step and step % self._run.checkpoint_every == 0:
            self._copy(step, current.plan, current.samples_before)

    def finish(self, steps: int) -> None:
        """Write the state after the run's last step, and wait until all files are written."""
        last = self._latest
        if last is not None and last.step == steps - 1:
            self._copy(steps, last.plan, last.samples_before + last.plan.global_batch)
        self._parts.put(None)
        self._thread.join()

    def _copy(self, step: int, plan: Plan, samples_before: int) -> None:
        layers, group = written_layers(plan, self._device)
        if not layers:
            return
        self._written.acquire()
        rule = self._scenario.training.optimizer.name
        dimensions = {layer: sharded_dimensions(self._layers[layer], rule) for layer in layers}
        share = Share(group.index(self._device), len(group), dimensions)
        tensors: dict[int, LayerTensors] = {}
        for layer in layers:
            row = self._compute.layer_state(one_layer(self._scenario, layer))
            named = named_state(self._layers[layer], rule, row)
            tensors[layer] = {
                name: each for name, each in named.items() if not share.index or name in dimensions[layer]
            }
        self._parts.put((step, plan, samples_before, tensors, share))

    def _write(self) -> None:
        try:
            while (part := self._parts.get()) is not None:
                step, plan, samples, layers, share = part
                if not self._run.allows_nan:
                    buffers = {layer: dict(self._layers[layer].named_buffers()) for layer in layers}
                    check_state(layers, buffers, step)
                self._folder.write(self._device, step, plan_json(plan), samples, self._model, layers, share)
                if 0 in layers and share.index == 0:
                    self._folder.drop_old(self._run.first_step, step)
                self._written.release()
        except Exception as error:
            self._failed(error)


def written_layers(plan: Plan, device: str) -> tuple[list[int], tuple[str, ...]]:
    """Return the layers whose state a device writes, and the devices that hold them together, itself among them.

    Each layer is written by the first device that trains it, or by all devices of the first tensor-parallel group.
    """
    stages = [stage for stage in plan.pipelines[0].stages if device in stage.replicas[0].devices]
    return [layer for stage in stages for layer in stage.layers], stages[0].replicas[0].devices if stages else ()
