"""The layers of one stage: forward, and backward in one part or in two, of several microbatches at a time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from executor.training.grad_buckets import GradBucketHooks
from executor.training.split_backward import WeightStore

Loss = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Held:
    """What a microbatch's backward starts from; the graph keeps the rest.

    Attributes:
        inputs: They get the gradient for the stage before.
        edge: The end of the graph, which does not keep the outputs; None if nothing can be differentiated.
        shape: Of the outputs.
    """

    inputs: torch.Tensor
    edge: GradientEdge | None
    shape: torch.Size


class StageModule:
    """Consecutive layers, and the state of the microbatches between their forward and their backward.

    Args:
        layers: In order.
        device: Where they are computed.
        precision: One of `planner.scenario.training.ELEMENT_BYTES`.
        copies_inputs: Whether a layer changes its inputs in place, so that the first one must get a copy.
    """

    def __init__(
        self, layers: Sequence[nn.Module], device: torch.device, precision: str, *, copies_inputs: bool
    ) -> None:
        self._layers = nn.Sequential(*layers).to(device)
        self._device = device
        self._precision = precision
        self._copies_inputs = copies_inputs
        self._recompute = False
        self._store = WeightStore()
        self._held: dict[int, _Held] = {}

    def start_step(self, *, recompute: bool, splits: bool) -> None:
        """Forget every microbatch, and prepare for a step.

        Args:
            recompute: Whether only the inputs are kept until backward, which computes the rest again, with the same
                random numbers.
            splits: Whether some microbatch's backward is split.
        """
        self._held.clear()
        self._store.clear()
        self._recompute = recompute
        if splits:
            self._store.install(self._layers.modules())
        else:
            self._store.remove()

    def forward(self, microbatch: int, inputs: torch.Tensor, loss: Loss | None = None) -> torch.Tensor:
        """Return the layers' outputs as float32, or the loss of them; detached.

        Args:
            microbatch: Index by which backward finds it.
            inputs: Requiring a gradient if the stage before wants it. They are kept.
            loss: Of the model, on the last stage.
        """
        with _computing_in(self._precision, self._device):
            if self._recompute:
                # Inside the context, so that it computes in the same precision again.
                outputs: torch.Tensor = checkpoint(self._run, inputs, loss, use_reentrant=False)
            else:
                outputs = self._run(inputs, loss)
        edge = get_gradient_edge(outputs) if outputs.requires_grad else None
        self._held[microbatch] = _Held(inputs, edge, outputs.shape)
        return outputs.detach()

    def backward(
        self, microbatch: int, gradient: torch.Tensor | None, watch: GradBucketHooks | None = None
    ) -> torch.Tensor | None:
        """Add to the parameters' gradients; return that of the inputs if they require it.

        Args:
            microbatch: Index; it is forgotten.
            gradient: Of the outputs; None if they are the loss.
            watch: Hears of every gradient.
        """
        held = self._held.pop(microbatch)
        if held.edge is not None:
            if gradient is None:
                gradient = torch.ones(held.shape, device=self._device)
            with watch.autograd() if watch is not None else nullcontext():
                torch.autograd.backward([held.edge], [gradient])
        if not held.inputs.requires_grad:
            return None
        # Nothing flows back through layers whose outputs do not depend on their inputs.
        return torch.zeros_like(held.inputs) if held.inputs.grad is None else held.inputs.grad

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Do as `backward`, but leave weight gradients for `backward_weight` that take time."""
        with self._store.putting_off(microbatch):
            return self.backward(microbatch, gradient)

    def backward_weight(self, microbatch: int, watch: GradBucketHooks | None = None) -> None:
        """Add what `backward_input` has left; ``watch`` hears of every gradient."""
        self._store.compute(microbatch, watch)

    def _run(self, inputs: torch.Tensor, loss: Loss | None) -> torch.Tensor:
        with self._store.paused():
            outputs: torch.Tensor = self._layers(inputs.clone() if self._copies_inputs else inputs)
            # What leaves a stage is float32, whatever is computed in.
            return outputs.float() if loss is None else loss(outputs).float()


def _computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context for forward computations of layers and loss.

    Args:
        precision: One of `planner.scenario.scenario.ELEMENT_BYTES`.
        device: Where they are computed.
    """
    if precision == "fp32":
        return nullcontext()
    assert precision == "bf16-mixed", precision
    return torch.autocast(device.type, torch.bfloat16)
