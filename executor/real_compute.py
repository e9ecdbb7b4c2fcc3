"""Trains the user's model: this rank's layers, forward and backward by autograd, torch's optimizers."""

from collections.abc import Sequence

import torch
from torch import nn

from executor.clock import RunClock
from executor.compute import Performed
from executor.model import LoadedModel, SampleShape
from planner.actions import Kind
from planner.gradient_sync import GradientSync
from planner.plan import Plan
from planner.program import DeviceProgram, Work
from planner.scenario import Optimizer, Training


class RealCompute:
    """One stage of the model on one rank.

    Args:
        loaded: The whole model, of which this stage's layers are trained.
        plan: Says which samples a pipeline's microbatches are; each pipeline takes the next part of the batch.
        program: This rank's first program.
        training: The update rule and the global batch.
        clock: Of the run.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        program: DeviceProgram,
        training: Training,
        clock: RunClock,
    ) -> None:
        self._clock = clock
        stages = plan.pipelines[program.pipeline].stages
        stage = stages[program.stage]
        self._model = loaded.model
        self._is_first = program.stage == 0
        self._is_last = program.stage == len(stages) - 1
        self._first_layer = stage.first_layer
        self._layers = nn.Sequential(*loaded.model.layers[stage.first_layer : stage.end_layer])
        self._input_shape = None if self._is_first else loaded.sizes[stage.first_layer - 1].output
        self._output_shape = loaded.sizes[stage.end_layer - 1].output
        self._batch = training.global_batch
        self._optimizer = _make_optimizer(training.optimizer, list(self._layers.parameters()))
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._loss = 0.0
        self._microbatch_starts: list[int] = []

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers that this rank trains."""
        return list(self._layers)

    @property
    def first_layer(self) -> int:
        """Index of the first of them in the model."""
        return self._first_layer

    def start_step(self, step: int, plan: Plan, program: DeviceProgram) -> None:
        """Find where this step's microbatches begin in the order of the data, and clear the gradients."""
        start = step * self._batch + sum(pipeline.samples for pipeline in plan.pipelines[: program.pipeline])
        self._microbatch_starts = []
        for size in plan.pipelines[program.pipeline].microbatches:
            self._microbatch_starts.append(start)
            start += size
        self._loss = 0.0
        self._optimizer.zero_grad(set_to_none=True)

    def run(self, work: Work, inputs: Sequence[torch.Tensor], *, waited: bool) -> Performed:
        """Run the layers forward or backward for one microbatch."""
        start_s = self._clock.now_s()
        if work.action.kind is Kind.FORWARD:
            result = self._forward(work, inputs)
        else:
            assert work.action.kind is Kind.BACKWARD
            result = self._backward(work, inputs)
        outputs = [_to_bytes(result[send.first - work.first : send.end - work.first]) for send in work.sends]
        return Performed(outputs, start_s, self._clock.now_s())

    def _forward(self, work: Work, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        data = (
            self._model.samples(self._microbatch_starts[work.action.microbatch] + work.first, work.end - work.first)
            if self._is_first or self._is_last
            else None
        )
        if self._is_first:
            assert data is not None
            received = data[0]
        else:
            assert self._input_shape is not None
            received = _from_bytes(inputs, self._input_shape).requires_grad_()
        outputs: torch.Tensor = self._layers(received)
        if self._is_last:
            assert data is not None
            outputs = self._model.loss(outputs, data[1]) * ((work.end - work.first) / self._batch)
            self._loss += float(outputs.detach())
        self._held[work.action.microbatch] = (received, outputs)
        return outputs.detach()

    def _backward(self, work: Work, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        received, outputs = self._held.pop(work.action.microbatch)
        gradient = None if self._is_last else _from_bytes(inputs, self._output_shape)
        # A first stage without parameters has nothing to differentiate.
        if outputs.requires_grad:
            torch.autograd.backward([outputs], [gradient])
        # Nothing flows back through a stage whose output does not depend on its input.
        return torch.zeros_like(received) if received.grad is None else received.grad

    def gradient(self, sync: GradientSync) -> torch.Tensor:
        """Return the gradients of the layers of ``sync`` in one row; zeros where a parameter has none."""
        rows = [
            torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.flatten()
            for parameter in self._parameters(sync)
        ]
        return torch.cat(rows)

    def put_gradient(self, sync: GradientSync, gradient: torch.Tensor) -> None:
        """Write the summed row back."""
        start = 0
        for parameter in self._parameters(sync):
            if parameter.requires_grad:
                parameter.grad = gradient[start : start + parameter.numel()].view_as(parameter).clone()
            start += parameter.numel()

    def finish_step(self) -> float | None:
        """Update the parameters; return this rank's part of the loss on the last stage."""
        self._optimizer.step()
        return self._loss if self._is_last else None

    def _parameters(self, sync: GradientSync) -> list[nn.Parameter]:
        layers = self._layers[sync.first_layer - self._first_layer : sync.end_layer - self._first_layer]
        return list(layers.parameters())


def _make_optimizer(optimizer: Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # torch refuses an empty list; a stage of layers without parameters still takes steps.
    parameters = parameters or [nn.Parameter(torch.zeros(0))]
    if optimizer.name == "adamw":
        return torch.optim.AdamW(parameters, lr=optimizer.learning_rate, weight_decay=optimizer.weight_decay)
    momentum = optimizer.momentum if optimizer.name == "momentum" else 0.0
    return torch.optim.SGD(
        parameters, lr=optimizer.learning_rate, momentum=momentum, weight_decay=optimizer.weight_decay
    )


def _to_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _from_bytes(parts: Sequence[torch.Tensor], shape: SampleShape) -> torch.Tensor:
    """One tensor of whole samples from the payloads of consecutive sample intervals."""
    row = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return row.view(shape.dtype).view(-1, *shape.sizes)
