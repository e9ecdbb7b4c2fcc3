"""Forward and backward (unsplit or split) of one stage's layers, for several microbatches in flight."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from executor.training.models.precision import autocast, boundary_dtype, use_tensor_cores
from executor.training.split_backward import GradBucketHooks, WeightStore
from traces.common.errors import InputError

Loss = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """A microbatch between its forward and its backward; autograd's graph has the other saved tensors.

    Attributes:
        inputs: The stage's inputs, whose gradient the previous stage needs.
        edge: The root of the graph, which does not keep the outputs in memory; None if nothing requires a gradient.
        shape: Shape of the outputs.
    """

    inputs: torch.Tensor
    edge: GradientEdge | None
    shape: torch.Size


class StageModule:
    """Runs consecutive layers forward and backward, and keeps each microbatch from its forward to its backward.

    Args:
        precision: One of `planner.scenario.training.PRECISIONS`.
        copies_inputs: Whether a layer changes its inputs in place, so that the layers must get a copy.
    """

    def __init__(
        self, layers: Sequence[nn.Module], device: torch.device, precision: str, *, copies_inputs: bool
    ) -> None:
        self._layers = nn.Sequential(*layers).to(device)
        self._device = device
        self._precision, self._dtype = precision, boundary_dtype(precision)
        self._copies_inputs = copies_inputs
        self._recompute = False
        self._store = WeightStore()
        self._forwarded: dict[int, _Forwarded] = {}

    def start_step(self, *, recompute: bool, splits: bool) -> None:
        """Drop all microbatches, and prepare for a step.

        Args:
            recompute: Whether only the inputs are kept until backward, which first repeats the forward with the same
                random numbers.
            splits: Whether the backward of some microbatch is split in two passes.
        """
        use_tensor_cores(self._precision)
        self._forwarded.clear()
        self._store.clear()
        self._recompute = recompute
        if splits:
            self._store.install(self._layers.modules())
        else:
            self._store.remove()

    def forward(self, microbatch: int, inputs: torch.Tensor, loss: Loss | None = None) -> torch.Tensor:
        """Return the layers' outputs in the type of `boundary_dtype`, or their loss as float32, as a detached tensor.

        Args:
            microbatch: Index of the microbatch, which its backward must give too.
            inputs: The inputs, which are kept; they must require a gradient if the previous stage needs it.
            loss: The model's loss function; None for the outputs.
        """
        with autocast(self._precision, self._device):
            if self._recompute:
                # Inside autocast, so that the recomputation has the same precision.
                outputs: torch.Tensor = checkpoint(
                    self._run,
                    inputs,
                    loss,
                    use_reentrant=False,
                    context_fn=lambda: (nullcontext(), _KeptStatistics(self._layers)),
                )
            else:
                outputs = self._run(inputs, loss)
        edge = get_gradient_edge(outputs) if outputs.requires_grad else None
        self._forwarded[microbatch] = _Forwarded(inputs, edge, outputs.shape)
        return outputs.detach()

    def backward(
        self, microbatch: int, gradient: torch.Tensor | None, buckets: GradBucketHooks | None = None
    ) -> torch.Tensor | None:
        """Add a microbatch's gradients to those of the parameters, and drop the microbatch.

        Args:
            microbatch: Index of the microbatch.
            gradient: Gradient of the outputs; None if forward has returned the loss.
            buckets: Reports when the gradients of buckets of layers are complete.

        Returns:
            The gradient of the inputs; None if they require none.
        """
        forwarded = self._forwarded.pop(microbatch)
        if forwarded.edge is not None:
            if gradient is None:
                gradient = torch.ones(forwarded.shape, device=self._device)
            with buckets.autograd() if buckets is not None else nullcontext():
                torch.autograd.backward([forwarded.edge], [gradient])
        inputs = forwarded.inputs
        if not inputs.requires_grad:
            return None
        # There is no gradient if the outputs do not depend on the inputs.
        return torch.zeros_like(inputs) if inputs.grad is None else inputs.grad

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Do as `backward`, but leave weight gradients of linear layers and convolutions to `backward_weight`."""
        with self._store.deferring(microbatch):
            return self.backward(microbatch, gradient)

    def backward_weight(self, microbatch: int, buckets: GradBucketHooks | None = None) -> None:
        """Add the weight gradients that `backward_input` has deferred to those of the parameters."""
        self._store.compute(microbatch, buckets)

    def deferred_bytes(self, microbatch: int) -> int:
        """Return the bytes that a microbatch holds from its `backward_input` to its `backward_weight`."""
        return self._store.deferred_bytes(microbatch)

    def _run(self, inputs: torch.Tensor, loss: Loss | None) -> torch.Tensor:
        with self._store.paused():
            outputs = inputs.clone() if self._copies_inputs else inputs
            *inner, last = self._layers
            for layer in inner:
                outputs = _checked(layer, layer(outputs)).to(self._dtype)
            outputs = _checked(last, last(outputs))
            return outputs.to(self._dtype) if loss is None else loss(outputs).float()


def _checked(layer: nn.Module, outputs: object) -> torch.Tensor:
    """Return the outputs of a layer if they are a tensor; a layer can return something else after the first steps."""
    if not isinstance(outputs, torch.Tensor):
        raise InputError(
            f"a layer of class {type(layer).__name__} returns a value of type {type(outputs).__name__}",
            valid="a layer returns one tensor in every step",
        )
    return outputs


class _KeptStatistics:
    """Keeps the running statistics of batch norm, which a recomputation would update a second time.

    Autograd may enter it for several parts of a graph, one after the other.
    """

    def __init__(self, layers: nn.Module) -> None:
        self._norms = [each for each in layers.modules() if isinstance(each, nn.modules.batchnorm._NormBase)]
        self._before: list[tuple[float | None, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        self._before = [(each.momentum, each.num_batches_tracked) for each in self._norms]
        for each in self._norms:
            # Another mode would save other tensors than the forward has saved.
            each.momentum = 0.0
            if each.num_batches_tracked is not None:
                each.num_batches_tracked = each.num_batches_tracked.clone()

    def __exit__(self, *exception: object) -> None:
        for each, (momentum, tracked) in zip(self._norms, self._before, strict=True):
            each.momentum, each.num_batches_tracked = momentum, tracked
