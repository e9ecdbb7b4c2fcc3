"""What a training framework takes of a device's memory, beside the tensors that training needs."""

import math
from dataclasses import dataclass

from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class MemoryEffects:
    """Memory that no tensor of the plan accounts for; nothing by default.

    Attributes:
        framework_bytes: On each device, whatever it computes: its context and loaded kernels, buffers of the
            communication library, and what the allocator keeps in reserve.
        workspace_share: What the backward of one layer holds only while it runs, gradients of activations and
            temporaries, relative to the activations that the layer keeps for it.

    Raises:
        InputError: A value is negative.
    """

    framework_bytes: int = 0
    workspace_share: float = 0.0

    def __post_init__(self) -> None:
        if self.framework_bytes < 0 or not 0 <= self.workspace_share < math.inf:
            raise InputError(
                f"{self.framework_bytes} bytes of framework and a workspace share of {self.workspace_share:g}",
                valid="neither is negative",
            )
