"""Which gradients a device of a tensor-parallel group computes from its own part alone, seen without the others."""

from collections.abc import Iterator

import torch
from torch.autograd.graph import Node


class TracingGroup:
    """One of so many devices, of which the others are not there; it follows what lies between columns and rows.

    Args:
        degree: Devices that share the layer.
    """

    def __init__(self, degree: int) -> None:
        self._degree = degree
        self._totals: list[Node] = []

    def shard(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return the first part of a tensor, cut along a dimension."""
        return whole.chunk(self._degree, dimension)[0]

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs without what they were made from: that gets the sum of all devices' gradients."""
        return inputs.detach().requires_grad_()

    def total(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs, and remember what they were made from."""
        if outputs.grad_fn is not None:
            self._totals.append(outputs.grad_fn)
        return outputs

    def gets_one_part(self) -> Iterator[torch.Tensor]:
        """Give what gets its gradient on this device from this device's part alone: shards, as it should be, or more.

        What a layer computes outside autograd's graph, in reentrant checkpoints for one, is not seen.
        """
        seen, waiting = set[Node](), list(self._totals)
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            # A node that adds to a leaf's gradient.
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                yield leaf
            waiting += [before for before, _ in node.next_functions if before is not None]
