"""Times messages inside a host in paced runs, which carry nothing: no TCP is as fast as NVLink or PCIe.

Only messages over a link of their own are timed (`planner.cost.network.own_link`). All others are sent, because traces,
outages and other messages on the same links decide how long they take.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from executor.core.clock import RunClock
from planner.cost.network import ConstantRatePath

# Bytes that are sent in place of a timed message: enough to tell that it has arrived.
STUB_BYTES = 64


class Emulation(Protocol):
    """Holds the messages from one device to another back, as the links between them would."""

    def transmit(self, bits: float, ready_s: float, flows: int) -> float:
        """Wait while the links carry ``bits`` in equal ``flows`` at once; return the run second of their end."""

    def delivery_s(self, departed_s: float) -> float:
        """Return the run second at which gloo must send the message."""


@dataclass(eq=False)
class TimedPath:
    """The path between two devices of a host, which carries one message after the other at a constant rate.

    Args:
        latency_s: Latency of the links; the time to hand over a message, which ``path`` includes, is that of this
            machine.
    """

    _path: ConstantRatePath
    _latency_s: float
    _clock: RunClock

    def __post_init__(self) -> None:
        self._free_s = 0.0

    def transmit(self, bits: float, ready_s: float, flows: int) -> float:
        """Wait until a message of ``bits`` has departed; return the run second of its departure."""
        self._free_s = max(ready_s, self._free_s) + self._path.transmission_s(bits / 8, flows)
        self._clock.sleep_until(self._free_s)
        return self._free_s

    def delivery_s(self, departed_s: float) -> float:
        """Return the run second at which gloo must send the message."""
        return departed_s + self._latency_s


def stub(payload: torch.Tensor) -> torch.Tensor:
    """Return what is sent in place of a payload."""
    return payload[:STUB_BYTES].contiguous()
