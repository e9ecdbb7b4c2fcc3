"""Real compute: a rank trains its stages of the user's model, by torch's autograd and optimizers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import InitVar, dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import nn

from executor.core.clock import RunClock
from executor.core.step_program import DeviceProgram, StepProgram, Work
from executor.training.compute import GradientParts, PacedCompute, Performed
from executor.training.data.loader import BatchPart, SampleLoader
from executor.training.data.order import Batch
from executor.training.device import CPU, from_payloads, seed_random, synchronize, to_payload
from executor.training.flat_state import FlatParameters, LayerState, TiedCopies, packed_state
from executor.training.models.loading import LoadedModel, SampleShape, is_empty
from executor.training.models.precision import shared_copies
from executor.training.models.trainable import TensorParallelModel, TiedModel
from executor.training.optimizer import UpdateRule, layers_squared_norm
from executor.training.split_backward import GradBucketHooks
from executor.training.stage_module import Loss, StageModule
from executor.training.tensor_parallel import TensorGroup, full_parameters, parameter_parts, shard_layer
from planner.adapt.migration import LayerTransfer
from planner.cost.device_speed import DeviceSpeed, device_speed
from planner.cost.synchronisation import GradientSync, samples_of_an_update
from planner.plan.actions import Kind
from planner.plan.plan import Plan, Stage
from planner.scenario.effects import ComputeEffects
from planner.scenario.training import Training
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of this rank.

    Attributes:
        input_shape: Shape of a sample of the inputs; None for the first stage, whose inputs are the model's data.
        output_shape: Shape of a sample of the outputs; None for the last stage, which computes the loss.
    """

    module: StageModule
    input_shape: SampleShape | None
    output_shape: SampleShape | None


@dataclass(eq=False)
class RealCompute:
    """Trains the stages of one rank.

    Args:
        plan: The plan, which gives this rank's stages until `set_plan` is called.
        program: This rank's program in the plan; None if the plan does not use the rank.
        device: The device that has the parameters and computes the layers.
        group: The tensor-parallel group that shares every layer of this rank; None if the rank is in no group.
        effects: The stragglers and slow-downs: after each action the rank sleeps until a slower device would be done.
        at_profile_speed: Whether an action lasts at least as long as the profile says.
    """

    _loaded: LoadedModel
    plan: InitVar[Plan]
    program: InitVar[DeviceProgram | None]
    _training: Training
    _clock: RunClock
    _device: torch.device = CPU
    _group: TensorGroup | None = None
    _effects: ComputeEffects = field(default_factory=ComputeEffects)
    _at_profile_speed: bool = False

    def __post_init__(self, plan: Plan, program: DeviceProgram | None) -> None:
        self._leads = self._group is None or self._group.leads
        self._speed = DeviceSpeed()
        training = self._training
        self._loader = SampleLoader(self._loaded.data, training.seed, self._loaded.workers)
        self._pipeline = -1
        self._stages: dict[int, _Stage] = {}
        self._layers: dict[int, nn.Module] = {}
        self._rule = UpdateRule([], self._training)
        # Outputs and gradients that pass between two stages of this rank, by receiving stage, kind and microbatch.
        self._local: dict[tuple[int, Kind, int], torch.Tensor] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._step = 0
        self._update_s = 0.0
        self._global_batch = training.global_batch
        self._learning_rate = training.optimizer.learning_rate
        self._first_samples: list[int] = []
        self._syncs: tuple[GradientSync, ...] = ()
        # This rank's copies of a parameter that several layers share, by layer.
        self._tied: dict[int, nn.Parameter] = {}
        self._tied_are_added = False
        self._samples_of_an_update = self._training.global_batch
        self.set_plan(plan, program)

    def set_plan(self, plan: Plan, program: DeviceProgram | None) -> None:
        """Replace the stages by those of another plan; layers that this rank trains already keep their state.

        The state of other layers must follow by `put_layer_state`, except at the start.
        """
        former, self._stages, self._layers = self._layers, {}, {}
        if program is not None:
            self._pipeline = program.pipeline
            for index, stage in enumerate(plan.pipelines[program.pipeline].stages):
                if any(program.device in replica.devices for replica in stage.replicas):
                    self._stages[index] = self._add_stage(stage)
        parameters = [each for layer in self._layers.values() for each in layer.parameters()]
        before, self._rule = self._rule, UpdateRule(parameters, self._training)
        self._rule.adopt(before)
        self._tied = {}
        if self._loaded.rebuild is not None:
            for index in former.keys() - self._layers.keys():
                former[index].to("meta")
        model = self._loaded.model
        for index, name in model.tied if isinstance(model, TiedModel) else ():
            if index in self._layers:
                parts = {part.name: part.parameter for part in parameter_parts(self._layers[index])}
                self._tied[index] = parts[name]

    def _add_stage(self, stage: Stage) -> _Stage:
        model, sizes = self._loaded.model, self._loaded.sizes
        layers = {index: model.layers[index] for index in stage.layers}
        if self._group is None:
            for layer in filter(is_empty, layers.values()):
                layer.to_empty(device=CPU)
        else:
            assert isinstance(model, TensorParallelModel), "the rank has checked this"
            for index, layer in layers.items():
                # One layer after the other, so that at most one is in memory as a whole.
                self._loaded.fill(index)
                shard_layer(layer, model.parallel_layout(index), self._group)
        self._layers |= layers
        # A change in any layer may change the stage's inputs, since earlier layers may return a view of their inputs.
        copies_inputs = any(size.changes_inputs for size in sizes[stage.first_layer : stage.end_layer])
        return _Stage(
            StageModule(list(layers.values()), self._device, self._training.precision, copies_inputs=copies_inputs),
            sizes[stage.first_layer - 1].output if stage.first_layer > 0 else None,
            sizes[stage.end_layer - 1].output if stage.end_layer < len(sizes) else None,
        )

    def state_bytes(self, move: LayerTransfer) -> int:
        """Return the size in bytes of the state of the layers of ``move``; the planned size does not count buffers."""
        return self._state(move).size_bytes

    def layer_state(self, move: LayerTransfer) -> torch.Tensor:
        """Return a copy of the state of the layers of ``move``: a one-dimensional uint8 tensor on the CPU."""
        return self._state(move).pack()

    def first_states(self, layers: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield the state before the first step of each of some layers that this rank has not trained."""
        for layer in self._loaded.first_layers(layers):
            # The rank's own rule would keep the optimizer's state for these layers.
            yield LayerState([layer], UpdateRule(list(layer.parameters()), self._training)).pack()

    def packed_state(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the state of a layer for `put_layer_state`, from unsharded tensors with the names of `named_state`."""
        return packed_state(self._loaded.model.layers[layer], self._training.optimizer.name, tensors, self._group)

    def put_layer_state(self, move: LayerTransfer, state: torch.Tensor) -> None:
        """Replace the state of the layers of ``move``."""
        self._state(move).unpack(state)

    def _state(self, move: LayerTransfer) -> LayerState:
        return LayerState([self._loaded.model.layers[index] for index in move.layers], self._rule)

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """The layers that this rank trains, by their index in the model."""
        return self._layers

    def named_parameters(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's parameters by the name ``LAYER.PARAMETER``; shards are gathered to the full parameters."""
        return {
            f"{index}.{name}": parameter
            for index, layer in self._layers.items()
            for name, parameter in full_parameters(layer, self._group)
        }

    def flat_parameters(self, first_layer: int, end_layer: int, elements: int) -> FlatParameters:
        """Return access to the parameters of layers ``first_layer`` to ``end_layer - 1``, which this rank trains."""
        found = FlatParameters([self._layers[index] for index in range(first_layer, end_layer)])
        assert found.elements == elements, (first_layer, end_layer, found.elements, elements)
        return found

    def wait_until(self, time_s: float) -> None:
        """Do nothing, since actions are timed by the clock."""

    @property
    def late_s(self) -> float:
        """Return 0: no action has a planned end."""
        return 0.0

    def free_s(self) -> float:
        """Return the present run second: the last action has ended."""
        return self._clock.now_s()

    def start_step(self, current: StepProgram) -> None:
        """Begin a step; drop gradients and activations of an unfinished step."""
        plan, program = current.plan, current.program
        self._step, self._global_batch, self._update_s = current.step, plan.global_batch, program.update_s
        trained = current.samples_before
        self._learning_rate = self._training.learning_rate(trained, plan.global_batch, plan.noise_scale)
        # The first device of a tensor-parallel group sleeps for all of them: the others wait for it.
        slow = (program.device, *program.partners) if self._leads else ()
        self._speed = device_speed(self._effects, slow) if slow else DeviceSpeed()
        pipeline = plan.pipelines[self._pipeline]
        before = sum(earlier.samples for earlier in plan.pipelines[: self._pipeline])
        self._first_samples = list(accumulate(pipeline.microbatches, initial=before))
        self._samples_of_an_update = samples_of_an_update(plan, self._pipeline)
        self._syncs = program.synchronisations
        self._tied_are_added = False
        split = {work.action.stage for work in program.work if work.action.kind is Kind.BACKWARD_INPUT}
        for index, stage in self._stages.items():
            stage.module.start_step(recompute=pipeline.stages[index].recompute, splits=index in split)
        self._local.clear()
        self._losses.clear()
        self._rule.clear_gradients()
        batch = Batch(trained, plan.global_batch, program.regional)
        self._loader.start_step(batch, list(self._batch_parts(program)))

    def _batch_parts(self, program: DeviceProgram) -> Iterator[BatchPart]:
        """Yield the parts of a step's batch that this rank needs: inputs for the first stage, targets for the last."""
        for work in program.work:
            stage = self._stages[work.action.stage]
            is_first, is_last = stage.input_shape is None, stage.output_shape is None
            if work.action.kind is Kind.FORWARD and (is_first or is_last):
                yield BatchPart(*self._place(work), is_first, is_last)

    def _place(self, work: Work) -> tuple[int, int]:
        """Return the first sample of an action in the step's batch, and their number."""
        return self._first_samples[work.action.microbatch] + work.first, work.end - work.first

    def close(self) -> None:
        """End the processes that load data; no step follows."""
        self._loader.close()

    def passes(self) -> AbstractContextManager[None]:
        """Return a context for all actions of a step, which share copies of the parameters in half precision."""
        return shared_copies()

    def run(
        self, work: Work, inputs: Sequence[torch.Tensor], *, ready_s: float, complete: Callable[[int], None]
    ) -> Performed:
        """Compute an action: the forward or backward of a stage for one microbatch, or a part of a split backward.

        Args:
            work: The action to compute.
            inputs: The payloads of ``work.receives``.
            ready_s: Run second of the last input's arrival; only paced compute uses this argument.
            complete: Called with the index of each gradient sum of ``work.completes`` when its gradients are complete.
        """
        start_s = self._clock.now_s()
        buckets = self._buckets(work, complete) if work.completes else None
        result = self._carry_out(work, inputs, buckets)
        if buckets is not None:
            buckets.close()
        outputs = []
        for send in work.sends:
            assert result is not None
            outputs.append(to_payload(result[send.first - work.first : send.end - work.first]))
        self._finish(start_s, work.duration_s)
        return Performed(outputs, start_s, self._clock.now_s())

    def _finish(self, start_s: float, profiled_s: float) -> None:
        """Wait until the device has done all work that began at ``start_s``, and until a slower one would have."""
        synchronize(self._device)
        took_s = self._clock.now_s() - start_s
        if self._at_profile_speed:
            took_s = max(took_s, profiled_s)
        self._clock.sleep_until(self._speed.end_s(start_s, took_s))

    def _buckets(self, work: Work, complete: Callable[[int], None]) -> GradBucketHooks:
        buckets = {}
        for each in work.completes:
            buckets[each.sync] = self._summed(self._syncs[each.sync])
        return GradBucketHooks(buckets, complete)

    def _carry_out(
        self, work: Work, inputs: Sequence[torch.Tensor], buckets: GradBucketHooks | None
    ) -> torch.Tensor | None:
        index, kind, microbatch = work.action.stage, work.action.kind, work.action.microbatch
        stage = self._stages[index]
        if kind is Kind.BACKWARD_WEIGHT:
            stage.module.backward_weight(microbatch, buckets)
            return None
        if kind is Kind.FORWARD:
            result: torch.Tensor | None = self._forward(work, stage, inputs)
            key = (index + 1, Kind.FORWARD, microbatch)
        else:
            gradient = None
            if stage.output_shape is not None:
                gradient = self._incoming((index, Kind.BACKWARD, microbatch), stage.output_shape, work, inputs)
            if kind is Kind.BACKWARD:
                result = stage.module.backward(microbatch, gradient, buckets)
            else:
                result = stage.module.backward_input(microbatch, gradient)
            key = (index - 1, Kind.BACKWARD, microbatch)
        if key[0] in self._stages and result is not None:
            self._local[key] = result
        return result

    def _forward(self, work: Work, stage: _Stage, payloads: Sequence[torch.Tensor]) -> torch.Tensor:
        microbatch, (start, count) = work.action.microbatch, self._place(work)
        loss: Loss | None = None
        if stage.output_shape is None:
            targets = self._loader.targets(start, count).to(self._device)
            loss = self._weighted_loss(targets, count / self._samples_of_an_update)
        if stage.input_shape is None:
            inputs = self._loader.inputs(start, count).to(self._device)
        else:
            key = (work.action.stage, Kind.FORWARD, microbatch)
            inputs = self._incoming(key, stage.input_shape, work, payloads).requires_grad_()
        seed_random(self._device, self._random_seed(work))
        outputs = stage.module.forward(microbatch, inputs, loss)
        if loss is not None:
            self._losses[microbatch] = outputs
        return outputs

    def _weighted_loss(self, targets: torch.Tensor, weight: float) -> Loss:
        def weighted(outputs: torch.Tensor) -> torch.Tensor:
            loss: object = self._loaded.model.loss(outputs, targets)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                found = list(loss.shape) if isinstance(loss, torch.Tensor) else f"a value of type {type(loss).__name__}"
                valid = "a tensor with one number, the mean over the samples"
                raise InputError(f"'loss' returns {found} in step {self._step + 1}", valid=valid)
            return loss * weight

        return weighted

    def _incoming(
        self, key: tuple[int, Kind, int], shape: SampleShape, work: Work, payloads: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return what another stage has computed: its outputs or, in backward, the gradient of this stage's outputs.

        If the other stage is on another rank, the first device of a tensor-parallel group has received the tensor, and
        broadcasts it to the group.
        """
        if key in self._local:
            return self._local.pop(key)
        if self._group is None:
            return from_payloads(payloads, shape.sizes, shape.dtype, self._device)
        if self._leads:
            received = from_payloads(payloads, shape.sizes, shape.dtype, self._group.device)
        else:
            received = torch.empty(work.end - work.first, *shape.sizes, dtype=shape.dtype, device=self._group.device)
        self._group.broadcast(received)
        return received.to(self._device)

    def _random_seed(self, work: Work) -> int:
        """Return the seed of a forward's random numbers, such as those of dropout; the same if a step is repeated."""
        place = (self._pipeline, work.action.stage, work.action.microbatch, work.first)
        sequence = np.random.SeedSequence((self._training.seed, self._step, *place))
        return int(sequence.generate_state(1, np.uint64)[0])

    def _summed(self, sync: GradientSync) -> list[nn.Parameter]:
        """Return the parameters whose gradients ``sync`` sums."""
        tied = list(self._tied.values())
        if sync.tied:
            return tied
        layers = [self._layers[index] for index in range(sync.first_layer, sync.end_layer)]
        return [each for layer in layers for each in layer.parameters() if all(each is not copy for copy in tied)]

    def _flat(self, sync: GradientSync) -> FlatParameters | TiedCopies:
        """Return access to the parameters whose gradients ``sync`` sums."""
        if sync.tied:
            self._add_up_tied()
            return TiedCopies(self._summed(sync))
        found = FlatParameters.of(self._summed(sync))
        assert found.elements == sync.elements, (sync, found.elements)
        return found

    def _add_up_tied(self) -> None:
        """Add the gradients of this rank's copies of a shared parameter, once in a step, after its last backward."""
        if len(self._tied) > 1 and not self._tied_are_added:
            TiedCopies(list(self._tied.values())).add_up()
        self._tied_are_added = True

    def begin_sum(self, sync: GradientSync) -> GradientParts:
        """Return the gradients that ``sync`` sums, whose parts are exchanged with other devices."""
        return GradientParts(self._flat(sync))

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        self._rule.clear_gradients()

    def squared_norm(self) -> float:
        """Return the squared Euclidean norm of this rank's present gradients; of tied copies the first counts."""
        self._add_up_tied()
        model = self._loaded.model
        first = model.tied[0][0] if self._tied and isinstance(model, TiedModel) else None
        others = [copy for index, copy in self._tied.items() if index != first]
        return layers_squared_norm(self._layers.values(), self._group, without=others)

    def finish_step(self, step: int, squared_norm: float | None) -> float | None:
        """Update the parameters; return this rank's part of the step's loss, or None if it computes no loss.

        Args:
            step: Index of the step that `start_step` has begun.
            squared_norm: Squared norm of the summed gradients of all layers of the model, by which they are clipped;
                None without clipping.
        """
        start_s = self._clock.now_s()
        self._add_up_tied()
        self._rule.update(self._learning_rate, squared_norm)
        # Wait for the GPU, so that the time of the next action does not include the update.
        self._finish(start_s, self._update_s)
        if all(stage.output_shape is not None for stage in self._stages.values()):
            return None
        # The other devices of a tensor-parallel group have computed the same loss.
        if not self._leads:
            return None
        # A fixed order of the sum, so that the order of the actions does not change the rounding.
        total = sum(self._losses[microbatch].item() for microbatch in sorted(self._losses))
        return total * (self._samples_of_an_update / self._global_batch)


# Computes the actions of one rank. Payloads are one-dimensional uint8 tensors, on a CUDA device if it computes there.
Compute = PacedCompute | RealCompute
