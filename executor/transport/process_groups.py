"""Torch's process groups, each of which is one connection between every two ranks."""

from datetime import timedelta

import torch.distributed as dist


class ProcessGroups:
    """Groups over all ranks, which make them together.

    Args:
        count: How many to begin with.
        patience: How long a rank waits for another one.
    """

    def __init__(self, count: int, patience: timedelta) -> None:
        self._patience = patience
        everybody = dist.group.WORLD
        assert everybody is not None
        self._groups = [everybody]
        self.use(count)

    def use(self, count: int) -> None:
        """Use so many from now on; those that there are not yet are made, which all ranks must do at the same point."""
        while len(self._groups) < count:
            self._groups.append(dist.new_group(backend="gloo", timeout=self._patience))
        self.count = count

    def __getitem__(self, index: int) -> dist.ProcessGroup:
        return self._groups[index]
