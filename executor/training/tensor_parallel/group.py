"""The ranks of a tensor-parallel group: what its first device shares, what they sum, who has which shard."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from executor.core.failures import blaming
from planner.plan.plan import Plan


class TensorGroup:
    """One tensor-parallel group, as one of its ranks sees it.

    What they exchange stays inside a host, is part of the time that a shard's profile gives its layers, and is no row.

    Args:
        group: The process group of exactly these ranks; it carries nothing else.
        devices: Its device names, in rank order; the first one leads.
        device: This rank's.
        kind: Where layers are computed, ``cpu`` or ``cuda``.
    """

    def __init__(self, group: dist.ProcessGroup, devices: Sequence[str], device: str, kind: str = "cpu") -> None:
        self._group = group
        self._mesh = DeviceMesh.from_group(group, kind)
        self._degree = len(devices)
        self._place = devices.index(device)
        self.leads = device == devices[0]
        self._peers = ", ".join(name for name in devices if name != device)

    def shard(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return this rank's part of a tensor that all ranks hold, cut along a dimension."""
        # Every rank has built the model from the same seed: nothing needs to be sent, or to be on the mesh's device.
        return whole.chunk(self._degree, dimension)[self._place]

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs, which all ranks hold; in backward, the sum of their gradients."""
        everywhere = DTensor.from_local(inputs, self._mesh, [Replicate()], run_check=False)
        return everywhere.to_local(grad_placements=[Partial()])

    def total(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' outputs; in backward, its gradient."""
        addends = DTensor.from_local(outputs, self._mesh, [Partial()], run_check=False)
        with blaming(self._peers):
            return addends.redistribute(placements=[Replicate()]).to_local()

    def whole(self, shard: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return the tensor that the ranks' shards were cut from, on the CPU."""
        own = shard.detach().cpu().contiguous()
        found = [torch.empty_like(own) for _ in range(self._degree)]
        with blaming(self._peers):
            dist.all_gather(found, own, group=self._group)
        return torch.cat(found, dimension)

    def share(self, values: torch.Tensor) -> None:
        """Overwrite everybody's values with the first rank's; they are on the CPU."""
        with blaming(self._peers):
            dist.broadcast(values, group=self._group, group_src=0)

    def announce(self, number: int) -> int:
        """Return the first rank's number."""
        told = torch.tensor([number])
        self.share(told)
        return int(told)

    def sum_number(self, number: float) -> float:
        """Return the sum of every rank's ``number``."""
        total = torch.tensor([number], dtype=torch.float64)
        with blaming(self._peers):
            dist.all_reduce(total, group=self._group)
        return float(total)


def form_group(plan: Plan, device: str, kind: str, patience: timedelta) -> TensorGroup | None:
    """Form the tensor-parallel groups of a plan, all ranks together; return this device's, if it is in one.

    Args:
        plan: Its devices are in rank order.
        device: This rank's.
        kind: Where layers are computed, ``cpu`` or ``cuda``.
        patience: How long a rank waits for another one.
    """
    own = None
    replicas = (replica for each in plan.pipelines for stage in each.stages for replica in stage.replicas)
    for devices in dict.fromkeys(replica.devices for replica in replicas if replica.partners):
        ranks = [plan.devices.index(name) for name in devices]
        # Device mesh and collectives take the ranks of a group in the order given here.
        formed = dist.new_group(ranks, timeout=patience, backend="gloo")
        if device in devices:
            assert formed is not None
            own = TensorGroup(formed, devices, device, kind)
    return own
