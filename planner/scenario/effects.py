"""Effects on transfers, compute and memory beyond the nominal values; each has a switch and is off by default."""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class MemoryEffects:
    """Memory in addition to parameters, gradients, optimizer state and activations; none by default.

    Attributes:
        framework_bytes: Constant bytes on each device: driver context and loaded kernels, buffers of the communication
            library, and memory that the allocator reserves.
        workspace_share: Ratio of the bytes that the backward of a layer allocates while it runs (gradients of
            activations, temporaries) to the bytes of activations that the layer saves in its forward.

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
        share: Share of a link's nominal rate (and of its size curve) that messages of a training job reach; below 1
            because nominal rates are measured on idle networks between idle hosts.
        payload_efficiency: Share of payload in a link's bits; `TCP_PAYLOAD_EFFICIENCY` for TCP over Ethernet.
        window_bytes: Limit on a TCP connection's window; a connection carries at most one window per round trip (RFC
            9293, section 3.8). Measured: 222 Mbit/s at a one-way latency of 50 ms with Linux' default limit of the send
            buffer, 4 MiB, which is filled again only when a third of it is free.
        ready_notice: Whether a transfer starts only when the receiver's notice that its receive is posted has arrived,
            as in gloo. Receivers send the notices of step n at the start of step n - 1, the notices of step 0 at its
            start. With a policy, they do not send the notices of step n before the plan of step n is decided.
        cold_start: Whether the window of a connection starts at `initial_window_bytes`, doubles every round trip while
            it is too small (RFC 6928, RFC 5681), and halves for each retransmission timeout that passes while the
            connection is idle (RFC 2861, as in Linux).
        idle_s: Minimum retransmission timeout, without the round trip, seconds; 0.2 in Linux. Infinite if windows stay
            open on idle connections (``net.ipv4.tcp_slow_start_after_idle=0``).
        initial_window_bytes: Window of a new connection, bytes; ten segments of 1448.
        handover_s: Time that software of sender and receiver takes to hand over a message, seconds, in addition to the
            links' latency. Measured: 0.5 ms in the median for messages of gloo from 20 KB to 1 MB, over emulated links.

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
    handover_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"share {self.share:g} of a link's rate is out of range", valid=_SHARE)
        if not 0 < self.payload_efficiency <= 1:
            raise InputError(f"payload efficiency {self.payload_efficiency:g} is out of range", valid=_SHARE)
        if not self.window_bytes > 0 or not 0 < self.initial_window_bytes < math.inf:
            raise InputError(
                f"a window of {self.window_bytes:g} bytes, initially {self.initial_window_bytes:g}, is not allowed",
                valid="give every window more than 0 bytes",
            )
        if not 0 <= self.handover_s < math.inf:
            raise InputError(f"handing over a message takes {self.handover_s:g} s", valid="give 0 s or more")
        if not self.idle_s >= 0:
            raise InputError(f"a connection counts as idle after {self.idle_s:g} s", valid="give 0 s or more")


# TCP as measured on Linux over wide-area links.
TCP = NetworkEffects(
    payload_efficiency=TCP_PAYLOAD_EFFICIENCY,
    window_bytes=2.8e6,
    ready_notice=True,
    cold_start=True,
    handover_s=0.0005,
)

# TCP on hosts that keep the windows of idle connections open, as executor/wan/linux.py sets them up.
WIDE_AREA_TCP = replace(TCP, idle_s=math.inf)

# Limit on the relative standard deviation of log-normal times; at larger ones, rare outliers dominate the mean.
LARGEST_JITTER = 10.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A device that is slower (or faster) than its profile by a constant factor.

    Attributes:
        factor: Ratio of the device's compute times to the profiled times.

    Raises:
        InputError: The factor is not above zero.
    """

    device: str
    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise InputError(
                f"device '{self.device}' takes {self.factor:g} times as long",
                valid="give a finite factor above zero",
            )


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A device whose speed changes over time, for example by heat or by other jobs on its machine.

    Attributes:
        times_s: Start of each interval of constant speed, seconds from the start of the run, rising; the first is 0.
        speed: Speed in each interval, relative to the profile; 0 if the device stands still. The last interval never
            ends.

    Raises:
        InputError: Times do not rise from 0, a speed is negative, or the last speed is 0.
    """

    device: str
    times_s: tuple[float, ...]
    speed: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.times_s or len(self.times_s) != len(self.speed):
            raise InputError(
                f"device '{self.device}' has {len(self.times_s)} times and {len(self.speed)} speeds",
                valid="give a speed for each time, and at least one of each",
            )
        if self.times_s[0] != 0:
            raise InputError(f"the first time is {self.times_s[0]:g} s", valid="let times start at 0 s")
        for number, (earlier_s, later_s) in enumerate(pairwise(self.times_s), start=2):
            if not earlier_s < later_s < math.inf:
                raise InputError(
                    f"time goes from {earlier_s:g} s to {later_s:g} s in interval {number}",
                    valid="times must rise from each interval to the next",
                )
        for number, speed in enumerate(self.speed, start=1):
            if not 0 <= speed < math.inf:
                raise InputError(
                    f"speed {speed:g} in interval {number} is not allowed",
                    valid="every speed is finite and not negative",
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
        launch_overhead_s: Seconds that the host needs to launch the kernels of a pass. They are added to every forward
            and every backward; if a backward is split, to the input gradient only.
        jitter: Standard deviation of an action's log-normal time, relative to its mean; the mean stays as profiled.
        seed: Seed of the random numbers of ``jitter``.
        transfers_block: Whether a device cannot compute while it sends or receives between stages, because compute and
            communication use one stream, as in DeepSpeed's pipeline engine.

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
class TransportEffects:
    """How tensors leave a GPU: by NCCL, or by gloo, which carries messages from host memory to host memory.

    Attributes:
        nccl: Whether messages between stages, and tensor-parallel groups, use NCCL where they can
            (`planner.cost.device_transport`).
        copies: Whether the copies between GPU and host take time, for messages that gloo carries.
        copy_bps: Rate of these copies, each way, bits per second; None for that of each device's kind in the datasheet.

    Raises:
        InputError: The rate is not finite and above zero.
    """

    nccl: bool = True
    copies: bool = False
    copy_bps: float | None = None

    def __post_init__(self) -> None:
        if self.copy_bps is not None and not 0 < self.copy_bps < math.inf:
            raise InputError(f"copies at {self.copy_bps:g} bit/s", valid="give a finite rate above zero")


@dataclass(frozen=True, slots=True)
class Effects:
    """All effects of a scenario: of TCP on links, on profiled compute times, on memory, and on the way out of GPUs.

    Raises:
        InputError: Transfers block compute, and copies have engines of their own, which contradict each other.
    """

    network: NetworkEffects = field(default_factory=NetworkEffects)
    compute: ComputeEffects = field(default_factory=ComputeEffects)
    memory: MemoryEffects = field(default_factory=MemoryEffects)
    transport: TransportEffects = field(default_factory=TransportEffects)

    def __post_init__(self) -> None:
        if self.compute.transfers_block and self.transport.copies:
            raise InputError(
                "'compute.transfers_block' means one stream for compute and transfers, but 'transport.copies' means "
                "streams of their own",
                valid="leave one of the two out",
            )
