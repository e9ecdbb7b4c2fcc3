"""Trains the user's model: this rank's stages, forward and backward by autograd, torch's optimizers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import nn

from executor.core.clock import RunClock
from executor.core.step_program import DeviceProgram, Work
from executor.training.compute import Performed
from executor.training.device import CPU, from_payloads, seed_random, settle, to_payload
from executor.training.flat_state import FlatParameters, LayerState
from executor.training.grad_buckets import GradBucketHooks
from executor.training.models.loading import LoadedModel, SampleShape
from executor.training.models.trainable import DataOrder, TensorParallelModel
from executor.training.optimizer import UpdateRule, group_squared_norm
from executor.training.stage_module import Loss, StageModule
from executor.training.tensor_parallel import TensorGroup, shard_layer, whole_parameters
from planner.adapt.migration import LayerTransfer
from planner.cost.synchronisation import GradientSync, samples_of_an_update
from planner.plan.actions import Kind
from planner.plan.plan import Plan, Stage
from planner.scenario.training import Training


@dataclass(frozen=True, slots=True)
class _HeldStage:
    """A stage that this rank holds.

    Attributes:
        module: Its layers.
        received: What the stage before puts out; None for the first one, which gets data.
        put_out: What it puts out itself; None for the last one, which has the loss.
    """

    module: StageModule
    received: SampleShape | None
    put_out: SampleShape | None


class RealCompute:
    """The stages of the model that one rank holds.

    Args:
        loaded: The whole model, of which these stages' layers are trained.
        plan: Says which stages; so does the one of `hold`, and those of the steps until then have the same ones.
        program: This rank's first program; None if it has none.
        training: The update rule and the global batch.
        clock: Of the run.
        device: Where layers are computed and their parameters kept.
        group: Who shares every layer with this rank; None if it has them alone.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        program: DeviceProgram | None,
        training: Training,
        clock: RunClock,
        device: torch.device = CPU,
        group: TensorGroup | None = None,
    ) -> None:
        self._loaded = loaded
        self._training = training
        self._clock = clock
        self._device = device
        self._group = group
        self._data = DataOrder(loaded.model, training.global_batch, training.seed)
        self._pipeline = -1
        self._stages: dict[int, _HeldStage] = {}
        self._layers: dict[int, nn.Module] = {}
        self._rule = UpdateRule([], training)
        self._handed_over: dict[tuple[int, Kind, int], torch.Tensor] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._step = 0
        self._first_samples: list[int] = []
        self._syncs: tuple[GradientSync, ...] = ()
        self._samples_of_an_update = training.global_batch
        self.hold(plan, program)

    def hold(self, plan: Plan, program: DeviceProgram | None) -> None:
        """Take up the stages of another plan; layers that this rank trains already keep their state."""
        self._stages, self._layers = {}, {}
        if program is not None:
            self._pipeline = program.pipeline
            for index, stage in enumerate(plan.pipelines[program.pipeline].stages):
                if any(program.device in replica.devices for replica in stage.replicas):
                    self._stages[index] = self._hold(stage)
        parameters = [each for layer in self._layers.values() for each in layer.parameters()]
        before, self._rule = self._rule, UpdateRule(parameters, self._training)
        self._rule.adopt(before)

    def state_bytes(self, move: LayerTransfer) -> int:
        """Return the bytes of the state of the layers of ``move``: more than it says, if they have buffers."""
        return self._state(move).size_bytes

    def layer_state(self, move: LayerTransfer) -> torch.Tensor:
        """Return a copy of the state of these layers."""
        return self._state(move).pack()

    def put_layer_state(self, move: LayerTransfer, state: torch.Tensor) -> None:
        """Replace the state of these layers."""
        self._state(move).unpack(state)

    def _state(self, move: LayerTransfer) -> LayerState:
        layers = [self._loaded.model.layers[index] for index in move.layers]
        return LayerState(layers, self._rule)

    def _hold(self, stage: Stage) -> _HeldStage:
        sizes = self._loaded.sizes
        layers = {index: self._loaded.model.layers[index] for index in stage.layers}
        self._cut(layers)
        self._layers |= layers
        # Any of them: before it there may be layers that pass on what they get, or a view of it.
        copies_inputs = any(size.changes_inputs for size in sizes[stage.first_layer : stage.end_layer])
        return _HeldStage(
            StageModule(list(layers.values()), self._device, self._training.precision, copies_inputs=copies_inputs),
            sizes[stage.first_layer - 1].output if stage.first_layer > 0 else None,
            sizes[stage.end_layer - 1].output if stage.end_layer < len(sizes) else None,
        )

    def _cut(self, layers: Mapping[int, nn.Module]) -> None:
        if self._group is None:
            return
        model = self._loaded.model
        assert isinstance(model, TensorParallelModel), "the launcher has checked this"
        for index, layer in layers.items():
            shard_layer(layer, model.parallel_layout(index), self._group)

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """The layers that this rank trains, by their index in the model."""
        return self._layers

    def named_parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the whole parameters by name, in a model whose layers are named by their index."""
        return {
            f"{index}.{name}": parameter
            for index, layer in self._layers.items()
            for name, parameter in whole_parameters(layer, self._group)
        }

    def rows(self, first_layer: int, end_layer: int, elements: int) -> FlatParameters:
        """Return the rows of layers ``first_layer`` to ``end_layer - 1``, all of which this rank trains."""
        rows = FlatParameters([self._layers[index] for index in range(first_layer, end_layer)])
        assert rows.elements == elements, (first_layer, end_layer, rows.elements, elements)
        return rows

    def wait_until(self, time_s: float) -> None:
        """Nothing follows: what is measured is when things happen."""

    def free_s(self) -> float:
        """Return the time: the last action has ended."""
        return self._clock.now_s()

    def start_step(self, step: int, plan: Plan, program: DeviceProgram) -> None:
        """Begin a step; whatever an unfinished one has left is dropped."""
        self._step = step
        pipeline = plan.pipelines[self._pipeline]
        before = sum(earlier.samples for earlier in plan.pipelines[: self._pipeline])
        self._first_samples = list(accumulate(pipeline.microbatches, initial=before))
        self._samples_of_an_update = samples_of_an_update(plan, self._pipeline)
        self._syncs = program.synchronisations
        split = {work.action.stage for work in program.work if work.action.kind is Kind.BACKWARD_INPUT}
        for index, held in self._stages.items():
            held.module.start_step(recompute=pipeline.stages[index].recompute, splits=index in split)
        self._handed_over.clear()
        self._losses.clear()
        self._rule.clear_gradients()

    def run(
        self, work: Work, inputs: Sequence[torch.Tensor], *, ready_s: float, complete: Callable[[int], None]
    ) -> Performed:
        """Run a stage's layers forward, backward, or through a part of backward, for one microbatch."""
        start_s = self._clock.now_s()
        watch = self._watch(work, complete) if work.completes else None
        result = self._carry_out(work, inputs, watch)
        if watch is not None:
            watch.close()
        outputs = []
        for send in work.sends:
            assert result is not None
            outputs.append(to_payload(result[send.first - work.first : send.end - work.first]))
        settle(self._device)
        return Performed(outputs, start_s, self._clock.now_s())

    def _watch(self, work: Work, complete: Callable[[int], None]) -> GradBucketHooks:
        buckets = {}
        for each in work.completes:
            sync = self._syncs[each.sync]
            layers = (self._layers[index] for index in range(sync.first_layer, sync.end_layer))
            buckets[each.sync] = [parameter for layer in layers for parameter in layer.parameters()]
        return GradBucketHooks(buckets, complete)

    def _carry_out(
        self, work: Work, inputs: Sequence[torch.Tensor], watch: GradBucketHooks | None
    ) -> torch.Tensor | None:
        stage, kind, microbatch = work.action.stage, work.action.kind, work.action.microbatch
        held = self._stages[stage]
        if kind is Kind.BACKWARD_WEIGHT:
            held.module.backward_weight(microbatch, watch)
            return None
        if kind is Kind.FORWARD:
            result: torch.Tensor | None = self._forward(work, held, inputs)
            key = (stage + 1, Kind.FORWARD, microbatch)
        else:
            gradient = None
            if held.put_out is not None:
                gradient = self._incoming((stage, Kind.BACKWARD, microbatch), held.put_out, work, inputs)
            if kind is Kind.BACKWARD:
                result = held.module.backward(microbatch, gradient, watch)
            else:
                result = held.module.backward_input(microbatch, gradient)
            key = (stage - 1, Kind.BACKWARD, microbatch)
        if key[0] in self._stages and result is not None:
            self._handed_over[key] = result
        return result

    def _forward(self, work: Work, held: _HeldStage, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        stage, microbatch, count = work.action.stage, work.action.microbatch, work.end - work.first
        loss: Loss | None = None
        if held.received is None or held.put_out is None:
            data, targets = self._data.samples(self._step, self._first_samples[microbatch] + work.first, count)
        if held.put_out is None:
            loss = self._part_of_loss(targets.to(self._device), count / self._samples_of_an_update)
        if held.received is None:
            entering = data.to(self._device)
        else:
            entering = self._incoming((stage, Kind.FORWARD, microbatch), held.received, work, inputs).requires_grad_()
        seed_random(self._device, self._random_seed(work))
        outputs = held.module.forward(microbatch, entering, loss)
        if loss is not None:
            self._losses[microbatch] = outputs
        return outputs

    def _part_of_loss(self, targets: torch.Tensor, share: float) -> Loss:
        return lambda outputs: self._loaded.model.loss(outputs, targets) * share

    def _incoming(
        self, key: tuple[int, Kind, int], shape: SampleShape, work: Work, payloads: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """What another stage has put out: one of this rank's own, or one that sent it."""
        if key in self._handed_over:
            return self._handed_over.pop(key)
        if self._group is None:
            return from_payloads(payloads, shape.sizes, shape.dtype, self._device)
        if self._group.leads:
            entering = from_payloads(payloads, shape.sizes, shape.dtype, CPU)
        else:
            entering = torch.empty(work.end - work.first, *shape.sizes, dtype=shape.dtype)
        self._group.broadcast(entering)
        return entering.to(self._device)

    def _random_seed(self, work: Work) -> int:
        """For dropout and the like: other numbers for every forward, the same ones if a step is done again."""
        place = (self._pipeline, work.action.stage, work.action.microbatch, work.first)
        sequence = np.random.SeedSequence((self._training.seed, self._step, *place))
        return int(sequence.generate_state(1, np.uint64)[0])

    def gradient(self, sync: GradientSync) -> torch.Tensor:
        """Return the gradients of the layers of ``sync`` in one row."""
        return self.rows(sync.first_layer, sync.end_layer, sync.elements).gradients()

    def put_gradient(self, sync: GradientSync, gradient: torch.Tensor) -> None:
        """Write the summed row back."""
        self.rows(sync.first_layer, sync.end_layer, sync.elements).put_gradients(gradient)

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        self._rule.clear_gradients()

    def squared_norm(self) -> float:
        """Return the squared Euclidean norm of this rank's gradients as they are now."""
        if self._group is not None:
            return group_squared_norm(self._layers.values(), self._group)
        return self._rule.squared_norm()

    def finish_step(self, step: int, squared_norm: float | None) -> float | None:
        """Update the parameters, clipping by ``squared_norm``; return this rank's part of the loss, if it has one."""
        self._rule.update(step, squared_norm)
        # Else the next action would seem to take the time of what the optimizer has begun.
        settle(self._device)
        if all(held.put_out is not None for held in self._stages.values()):
            return None
        # The partners of a tensor-parallel group have computed the same loss.
        if self._group is not None and not self._group.leads:
            return None
        # In the order of the microbatches, whatever order they were computed in.
        total = sum(self._losses[microbatch].item() for microbatch in sorted(self._losses))
        return total * (self._samples_of_an_update / self._training.global_batch)
