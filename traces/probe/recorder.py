"""Measures a path again and again, each time by a burst of bounded size, and appends what it found to a recording."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from traces.common.errors import InputError
from traces.probe.bursts import MOST_SECONDS, BurstOrder, Direction
from traces.probe.conversation import Address, PeerError
from traces.probe.peer import PATIENCE_S, BusyError, Peer
from traces.probe.recording import Recording, Sample

# Round trips before each burst.
_ECHOES = 9

# Of the time to the next sample, a burst may take this share.
_BURST_SHARE = 0.6

_RETRY_S = 0.5

# Before the second half of a burst, slow start has to open windows as wide as the path: half the burst is what it takes
# then, and as much again before that is room for connections that do not start at once.
_BURSTS_IN_FLIGHT = 4

# A shorter burst is a few reads of the receiver.
_LEAST_BURST_S = 0.02


@dataclass(frozen=True, slots=True)
class RecordingConfig:
    """How a path is recorded.

    Attributes:
        address: Of the responder at its other end.
        direction: ``there`` to the responder, or ``back``.
        every_s: From one sample to the next, seconds.
        traffic_bytes: Of a sample's burst.
        connections: Over which it goes.
        payload_share: Of a link's bits that is payload: rates are those of the link.
        duration_s: How long to record, seconds; infinite until somebody ends it.

    Raises:
        InputError: A value is out of range.
    """

    address: Address
    direction: Direction
    every_s: float
    traffic_bytes: int
    connections: int
    payload_share: float
    duration_s: float

    def __post_init__(self) -> None:
        if not self.every_s >= 0.1:
            raise InputError(f"a sample every {self.every_s:g} s", where="--every", valid="0.1 s or more")
        if not self.duration_s > 0:
            raise InputError(f"a recording of {self.duration_s:g} s", where="--duration", valid="longer than 0 s")
        try:
            self.burst()
        except InputError as error:
            raise error.within("--traffic and --connections") from None

    def burst(self) -> BurstOrder:
        """Return the burst of one sample."""
        seconds = min(MOST_SECONDS, _BURST_SHARE * self.every_s)
        return BurstOrder(self.direction, self.traffic_bytes, seconds, self.connections)


class Recorder:
    """Samples a path into a recording.

    Args:
        orders: How.
        recording: Open.
        tell: Called with a line for each sample, and about what is wrong with them.
    """

    def __init__(self, orders: RecordingConfig, recording: Recording, tell: Callable[[str], None]) -> None:
        self._orders = orders
        self._recording = recording
        self._tell = tell
        self._patience_s = min(PATIENCE_S, max(1.0, orders.every_s))
        self._token = ""
        self._warned = False

    def record(self) -> None:
        """Take samples until the time is over.

        Where the other end cannot be reached the path carries nothing, except at first: then the address is wrong.

        Raises:
            InputError: The other end does not answer the first time, or the bursts are too small to be timed.
            RunError: The responder is busy then, or the file cannot be written.
        """
        first_s, orders = self._recording.end_s, self._orders
        # Machine time of which nothing can be said.
        start_s, left_out_s = time.monotonic(), 0.0
        number, due_s = 0, 0.0
        while due_s < orders.duration_s:
            time.sleep(max(0.0, start_s + left_out_s + due_s - time.monotonic()))
            asked_s = time.monotonic()
            sample = self._sample(is_first=number == 0)
            if sample is None:
                # The recording stands still meanwhile.
                time.sleep(_RETRY_S)
                left_out_s += time.monotonic() - asked_s
                continue
            time_s = asked_s - start_s - left_out_s
            self._recording.append(first_s + time_s, sample)
            self._tell(
                f"{first_s + time_s:.1f} s: {sample.bandwidth_bps / 1e6:.4g} Mbit/s, {1000 * sample.latency_s:.4g} ms"
            )
            number += 1
            # A sample that took long leaves out those that were due meanwhile.
            passed_s = time.monotonic() - start_s - left_out_s
            due_s = orders.every_s * max(round(due_s / orders.every_s) + 1, int(passed_s / orders.every_s))

    def _sample(self, *, is_first: bool) -> Sample | None:
        """Return what was found; None where nothing can be said: the responder is busy, for one."""
        latency_s = self._recording.latency_s or 0.0
        try:
            with Peer(self._orders.address, self._patience_s, self._token) as peer:
                self._token = peer.token
                latency_s = median(peer.round_trips_s(_ECHOES)) / 2
                arrivals, _ = peer.burst(self._orders.burst())
        except BusyError as error:
            if is_first:
                raise
            self._tell(f"not recorded: {error}")
            return None
        except (InputError, PeerError) as error:
            if is_first:
                raise
            self._tell(f"outage: {error.problem if isinstance(error, InputError) else error}")
            return Sample(0.0, latency_s)
        rate_bps = arrivals.last_half_bps()
        if rate_bps is None:
            problem = f"all {arrivals.size_bytes:,} bytes came at once"
            if is_first:
                raise InputError(problem, where="--traffic", valid="give more, such as '2 MB'")
            self._tell(f"not recorded: {problem}")
            return None
        self._check_size(rate_bps, latency_s, arrivals.complete)
        return Sample(rate_bps / self._orders.payload_share, latency_s)

    def _check_size(self, rate_bps: float, latency_s: float, complete: bool) -> None:
        """Say once that a burst ended before windows were as wide as the path, or before anybody could time it."""
        needed_bytes = rate_bps * max(_BURSTS_IN_FLIGHT * 2 * latency_s, _LEAST_BURST_S) / 8
        if complete and not self._warned and needed_bytes > self._orders.traffic_bytes:
            self._warned = True
            self._tell(
                f"bursts of {self._orders.traffic_bytes / 1e6:g} MB are too short for what this link carries, and can "
                f"show too little: give '--traffic {max(1.0, needed_bytes / 1e6):.0f} MB' or more"
            )
