"""What happens to bytes and to compute beside the nominal rates: each effect on its own switch, all off by default."""

import math
from dataclasses import dataclass, field

# Ethernet frames of 1500 bytes of IP carry 1448 bytes of TCP payload (timestamps on) in 1514 bytes on the wire.
TCP_PAYLOAD_EFFICIENCY = 1448 / 1514


@dataclass(frozen=True, slots=True)
class NetworkEffects:
    """What TCP makes of a link.

    Attributes:
        payload_efficiency: Share of a link's bits that is payload; `TCP_PAYLOAD_EFFICIENCY` for TCP over Ethernet.
        window_bytes: Of one connection: it never carries more than a window per round trip (RFC 9293, section 3.8;
            measured: 341 Mbit/s at 25 ms one way with Linux' default of 4 MB).
        ready_notice: A transfer starts only when the receiver's notice, sent at the start of its step, is there
            (measured on gloo, which moves nothing before the receive is posted).
        cold_start: A connection that was idle for longer than `idle_s` starts with a window of
            `initial_window_bytes` and doubles it every round trip (RFC 6928; RFC 5681, section 4.1).
        idle_s: Retransmission timeout after which a connection counts as idle, seconds.
        initial_window_bytes: Ten segments.
    """

    payload_efficiency: float = 1.0
    window_bytes: float = math.inf
    ready_notice: bool = False
    cold_start: bool = False
    idle_s: float = 0.2
    initial_window_bytes: float = 14480.0


# What was measured on Linux over wide-area links.
TCP = NetworkEffects(TCP_PAYLOAD_EFFICIENCY, window_bytes=4e6, ready_notice=True, cold_start=True)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A device that always takes longer.

    Attributes:
        device: Its name.
        factor: Its compute takes so many times as long as profiled.
    """

    device: str
    factor: float


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A device whose speed changes: it gets hot, or shares its machine.

    Attributes:
        device: Its name.
        times_s: When each piece starts, from the start of the run; the first is 0.
        speed: Of each piece, relative to the profile; 0 stands still.
    """

    device: str
    times_s: tuple[float, ...]
    speed: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ComputeEffects:
    """What happens to profiled compute times.

    Attributes:
        launch_overhead_s: Added to every action: the host issues its kernels.
        jitter: Standard deviation of an action's time relative to its mean, which stays as profiled; log-normal.
        seed: Of the jitter.
        stragglers: Devices that always take longer.
        slowdowns: Devices whose speed changes.
    """

    launch_overhead_s: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    stragglers: tuple[Straggler, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()


@dataclass(frozen=True, slots=True)
class Effects:
    """Both."""

    network: NetworkEffects = field(default_factory=NetworkEffects)
    compute: ComputeEffects = field(default_factory=ComputeEffects)
