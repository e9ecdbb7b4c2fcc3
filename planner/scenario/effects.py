"""What happens to bytes and to compute beside the nominal rates: each effect on its own switch, all off by default."""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

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


# Ethernet frames of 1500 bytes of IP carry 1448 bytes of TCP payload (timestamps on) in 1514 bytes on the wire.
TCP_PAYLOAD_EFFICIENCY = 1448 / 1514


@dataclass(frozen=True, slots=True)
class NetworkEffects:
    """What TCP makes of a link.

    Attributes:
        share: Of what was measured of a link, its size curve included, that a training job's messages reach: benchmarks
            are made on idle networks with idle hosts.
        payload_efficiency: Share of a link's bits that is payload; `TCP_PAYLOAD_EFFICIENCY` for TCP over Ethernet.
        window_bytes: Of one connection: it never carries more than a window per round trip (RFC 9293, section 3.8;
            measured on the test bed's links: 222 Mbit/s at 50 ms one way with Linux' largest send buffer of 4 MiB, of
            which headers and bookkeeping take a third).
        ready_notice: A transfer starts only when the receiver's notice is there (measured on gloo, which moves nothing
            before the receive is posted). The notices of a step are sent at the start of the step before it, those of
            the first step at its own; where a policy decides, not before the step's plan is known.
        cold_start: A connection starts with a window of `initial_window_bytes`, which doubles every round trip while
            it is too small (RFC 6928, RFC 5681), and is halved for each retransmission timeout of idleness, as Linux
            does it (RFC 2861).
        idle_s: Least retransmission timeout, to which a round trip comes, seconds; Linux has 0.2 s. Infinite where idle
            windows stay open (``net.ipv4.tcp_slow_start_after_idle=0``).
        initial_window_bytes: Ten segments.

    Raises:
        InputError: A value is out of range.
    """

    share: float = 1.0
    payload_efficiency: float = 1.0
    window_bytes: float = math.inf
    ready_notice: bool = False
    cold_start: bool = False
    idle_s: float = 0.2
    initial_window_bytes: float = 14480.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"share {self.share:g} of a link's rate", valid="a share above 0, 1 at most")
        if not 0 < self.payload_efficiency <= 1:
            raise InputError(f"payload efficiency {self.payload_efficiency:g}", valid="a share above 0, 1 at most")
        if not self.window_bytes > 0 or not 0 < self.initial_window_bytes < math.inf:
            raise InputError(
                f"windows of {self.window_bytes:g} and at first {self.initial_window_bytes:g} bytes",
                valid="every window holds more than 0 bytes",
            )
        if not self.idle_s >= 0:
            raise InputError(f"a connection counts as idle after {self.idle_s:g} s", valid="not negative")


# What was measured on Linux over wide-area links.
TCP = NetworkEffects(payload_efficiency=TCP_PAYLOAD_EFFICIENCY, window_bytes=2.8e6, ready_notice=True, cold_start=True)

# The same on hosts that keep the windows of idle connections open, as the relay's do: executor/wan/tcp_settings.py.
WIDE_AREA_TCP = replace(TCP, idle_s=math.inf)

# Beyond this a log-normal time is all tail.
LARGEST_JITTER = 10.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A device that always takes longer.

    Attributes:
        device: Its name.
        factor: Its compute takes so many times as long as profiled.

    Raises:
        InputError: The factor is not above zero.
    """

    device: str
    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise InputError(f"device '{self.device}' takes {self.factor:g} times as long", valid="a number above zero")


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A device whose speed changes: it gets hot, or shares its machine.

    Attributes:
        device: Its name.
        times_s: When each piece starts, from the start of the run; the first is 0.
        speed: Of each piece, relative to the profile; 0 stands still. The last one holds for ever.

    Raises:
        InputError: Times do not rise from 0, a speed is negative, or the device stands still for ever.
    """

    device: str
    times_s: tuple[float, ...]
    speed: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.times_s or len(self.times_s) != len(self.speed):
            raise InputError("times and speeds differ in number", valid="give one of each per piece, at least one")
        if self.times_s[0] != 0:
            raise InputError(f"the first time is {self.times_s[0]:g} s", valid="times start at 0 s")
        for number, (earlier_s, later_s) in enumerate(pairwise(self.times_s), start=2):
            if not earlier_s < later_s < math.inf:
                raise InputError(
                    f"time goes from {earlier_s:g} s to {later_s:g} s in piece {number}",
                    valid="times must rise from piece to piece",
                )
        for number, speed in enumerate(self.speed, start=1):
            if not 0 <= speed < math.inf:
                raise InputError(f"speed {speed:g} in piece {number}", valid="every speed is finite and not negative")
        if self.speed[-1] == 0:
            raise InputError(
                f"device '{self.device}' stands still for ever from {self.times_s[-1]:g} s on",
                valid="add a piece with a speed above zero; for a device that leaves, write a fault",
            )


@dataclass(frozen=True, slots=True)
class ComputeEffects:
    """What happens to profiled compute times.

    Attributes:
        launch_overhead_s: Added to every forward and every backward, of which a split one has it in its input gradient:
            the host issues the kernels.
        jitter: Standard deviation of an action's time relative to its mean, which stays as profiled; log-normal.
        seed: Of the jitter.
        stragglers: Devices that always take longer.
        slowdowns: Devices whose speed changes.
        transfers_block: A device computes nothing while it sends or receives a transfer between stages: one stream
            carries both, as in DeepSpeed's pipeline engine.

    Raises:
        InputError: A value is out of range, or a device is named twice among the stragglers or the slow-downs.
    """

    launch_overhead_s: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    stragglers: tuple[Straggler, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    transfers_block: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.launch_overhead_s < math.inf:
            raise InputError(f"launch overhead of {self.launch_overhead_s:g} s", valid="not negative, and finite")
        if not 0 <= self.jitter <= LARGEST_JITTER:
            raise InputError(f"jitter {self.jitter:g}", valid=f"a share of the mean, 0 to {LARGEST_JITTER:g}")
        for entries in (self.stragglers, self.slowdowns):
            names = [entry.device for entry in entries]
            for name in names:
                if names.count(name) > 1:
                    raise InputError(f"device '{name}' is named twice", valid="keep one of the two")


@dataclass(frozen=True, slots=True)
class Effects:
    """What happens to bytes and what happens to compute.

    Attributes:
        network: What TCP makes of a link.
        compute: What happens to profiled times.
    """

    network: NetworkEffects = field(default_factory=NetworkEffects)
    compute: ComputeEffects = field(default_factory=ComputeEffects)
    memory: MemoryEffects = field(default_factory=MemoryEffects)
