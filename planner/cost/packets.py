"""What packets do to the messages that they carry: jitter of their latencies, and their loss."""

import math

# TCP payload of an Ethernet frame, timestamps on; the frame takes 1514 bytes on the wire.
PAYLOAD_BYTES = 1448


def jitter_delay_s(jitter_s: float, size_bytes: float) -> float:
    """Return how much later the last byte of a message is there on average, seconds.

    The expected maximum of n independent delays, evenly distributed from 0 to J: J n / (n + 1) for a message of n
    frames, one at least. Packets stay in order, so that the message waits for the slowest of them.

    Args:
        jitter_s: The longest delay J of a packet, seconds.
        size_bytes: Payload of the message.
    """
    if not jitter_s:
        return 0.0
    frames = max(1, math.ceil(size_bytes / PAYLOAD_BYTES))
    return jitter_s * frames / (frames + 1)


def loss_ceiling_bps(loss_share: float, round_trip_s: float) -> float:
    """Return what one TCP connection carries at most where packets are lost, payload bits per second.

    MSS / RTT * sqrt(3 / 2) / sqrt(p), whose constant is that of evenly spaced losses and of an acknowledgement for
    every segment (Mathis, Semke, Mahdavi and Ott, The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm,
    1997).

    Args:
        loss_share: Of the packets, p.
        round_trip_s: Latency there and back, seconds.
    """
    if not loss_share or not round_trip_s:
        return math.inf
    return 8 * PAYLOAD_BYTES / round_trip_s * math.sqrt(1.5 / loss_share)
