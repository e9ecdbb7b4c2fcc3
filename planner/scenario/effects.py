"""Effects on bytes, compute and memory beyond the nominal values, each with its own switch, all off by default."""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class MemoryEffects:
    """Memory beside the tensors of a plan; none by default.

    Attributes:
        framework_bytes: Bytes on each device, whatever it computes: context and loaded kernels, buffers of the
            communication library, and the allocator's reserve.
        workspace_share: Bytes that the backward of one layer holds only while it runs (gradients of activations and
            temporaries), relative to the activations that the layer saves for it.

    Raises:
        InputError: A value is negative.
    """

    framework_bytes: int = 0
    workspace_share: float = 0.0

    def __post_init__(self) -> None:
        if self.framework_bytes < 0 or not 0 <= self.workspace_share < math.inf:
            raise InputError(
                f"{self.framework_bytes} bytes of framework and a workspace share of {self.workspace_share:g} are not "
                "allowed",
                valid="give values that are finite and not negative",
            )


# Ethernet frames of 1500 bytes of IP carry 1448 bytes of TCP payload (timestamps on) in 1514 bytes on the wire.
TCP_PAYLOAD_EFFICIENCY = 1448 / 1514

_SHARE = "give a share above 0, 1 at most"


@dataclass(frozen=True, slots=True)
class NetworkEffects:
    """Effects of TCP on a link.

    Attributes:
        share: Share of a link's measured rate, its size curve included, that a training job's messages reach:
            benchmarks are made on idle networks with idle hosts.
        payload_efficiency: Share of a link's bits that is payload; `TCP_PAYLOAD_EFFICIENCY` for TCP over Ethernet.
        window_bytes: Largest window of a connection, which carries at most one window per round trip (RFC 9293, section
            3.8; measured on the test bed's links: 222 Mbit/s at 50 ms one way with Linux' largest send buffer of 4 MiB,
            of which headers and bookkeeping take a third).
        ready_notice: Whether a transfer starts only when the receiver's notice has arrived (measured on gloo, which
            sends nothing before the receive is posted). The notices of a step are sent at the start of the step before
            it, those of the first step at its own; where a policy decides, not before the step's plan is known.
        cold_start: Whether a connection starts with a window of `initial_window_bytes`, which doubles every round trip
            while it is too small (RFC 6928, RFC 5681), and is halved for each retransmission timeout of idleness, as in
            Linux (RFC 2861).
        idle_s: Smallest retransmission timeout, to which a round trip is added, seconds; 0.2 s in Linux. Infinite where
            windows stay open on idle connections (``net.ipv4.tcp_slow_start_after_idle=0``).
        initial_window_bytes: Window of a new connection, ten segments.

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
            raise InputError(f"share {self.share:g} of a link's rate is not allowed", valid=_SHARE)
        if not 0 < self.payload_efficiency <= 1:
            raise InputError(f"payload efficiency {self.payload_efficiency:g} is not allowed", valid=_SHARE)
        if not self.window_bytes > 0 or not 0 < self.initial_window_bytes < math.inf:
            raise InputError(
                f"windows of {self.window_bytes:g} and at first {self.initial_window_bytes:g} bytes are not allowed",
                valid="give every window more than 0 bytes",
            )
        if not self.idle_s >= 0:
            raise InputError(f"a connection counts as idle after {self.idle_s:g} s", valid="give 0 s or more")


# Measured on Linux over wide-area links.
TCP = NetworkEffects(payload_efficiency=TCP_PAYLOAD_EFFICIENCY, window_bytes=2.8e6, ready_notice=True, cold_start=True)

# The same on hosts that keep the windows of idle connections open, as the relay's do: executor/wan/linux.py.
WIDE_AREA_TCP = replace(TCP, idle_s=math.inf)

# Beyond this a log-normal time is all tail.
LARGEST_JITTER = 10.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A device that always takes longer.

    Attributes:
        device: Name of the device.
        factor: Ratio of its compute times to the profiled ones.

    Raises:
        InputError: The factor is not above zero.
    """

    device: str
    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise InputError(
                f"device '{self.device}' takes {self.factor:g} times as long", valid="give a number above zero"
            )


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A device whose speed changes over time, as by heat or by sharing its machine.

    Attributes:
        device: Name of the device.
        times_s: Seconds from the start of the run at which each piece starts, the first at 0; [pieces].
        speed: Speed in each piece, relative to the profile; 0 computes nothing. The last one holds for ever; [pieces].

    Raises:
        InputError: Times do not rise from 0, a speed is negative, or the last speed is 0.
    """

    device: str
    times_s: tuple[float, ...]
    speed: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.times_s or len(self.times_s) != len(self.speed):
            raise InputError("times and speeds differ in number", valid="give one of each per piece, at least one")
        if self.times_s[0] != 0:
            raise InputError(f"the first time is {self.times_s[0]:g} s", valid="let times start at 0 s")
        for number, (earlier_s, later_s) in enumerate(pairwise(self.times_s), start=2):
            if not earlier_s < later_s < math.inf:
                raise InputError(
                    f"time goes from {earlier_s:g} s to {later_s:g} s in piece {number}",
                    valid="times must rise from piece to piece",
                )
        for number, speed in enumerate(self.speed, start=1):
            if not 0 <= speed < math.inf:
                raise InputError(
                    f"speed {speed:g} in piece {number} is not allowed", valid="every speed is finite and not negative"
                )
        if self.speed[-1] == 0:
            raise InputError(
                f"device '{self.device}' stands still for ever from {self.times_s[-1]:g} s on",
                valid="add a piece with a speed above zero; for a device that leaves, write a fault",
            )


@dataclass(frozen=True, slots=True)
class ComputeEffects:
    """Effects on profiled compute times.

    Attributes:
        launch_overhead_s: Seconds in which the host launches the kernels of a pass, added to every forward and every
            backward; a split backward has them in its input gradient.
        jitter: Standard deviation of an action's log-normal time, relative to its mean, which stays as profiled.
        seed: Seed of the jitter.
        stragglers: Devices that always take longer.
        slowdowns: Devices whose speed changes.
        transfers_block: Whether a device computes nothing while it sends or receives a transfer between stages: one
            stream carries both, as in DeepSpeed's pipeline engine.

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
            problem = f"a launch overhead of {self.launch_overhead_s:g} s is not allowed"
            raise InputError(problem, valid="give a finite time that is not negative")
        if not 0 <= self.jitter <= LARGEST_JITTER:
            valid = f"give a share of the mean, 0 to {LARGEST_JITTER:g}"
            raise InputError(f"jitter {self.jitter:g} is not allowed", valid=valid)
        for entries in (self.stragglers, self.slowdowns):
            names = [entry.device for entry in entries]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise InputError(f"device '{twice}' is named twice", valid="keep one of the two")


@dataclass(frozen=True, slots=True)
class Effects:
    """All effects of a scenario.

    Attributes:
        network: Effects of TCP on links.
        compute: Effects on profiled compute times.
        memory: Memory beside the tensors of a plan.
    """

    network: NetworkEffects = field(default_factory=NetworkEffects)
    compute: ComputeEffects = field(default_factory=ComputeEffects)
    memory: MemoryEffects = field(default_factory=MemoryEffects)
