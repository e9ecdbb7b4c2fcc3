"""Records a path: measures it at intervals by bursts of bounded size, and appends the samples to a recording."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from traces.common.errors import InputError
from traces.probe.bursts import MOST_SECONDS, BurstRequest, Direction
from traces.probe.conversation import Address, PeerError
from traces.probe.peer import ANSWER_TIMEOUT_S, BusyError, Peer
from traces.probe.recording import Recording, Sample

# Round trips before each burst.
_ECHOES = 9

# Share of the time to the next sample that a burst may take.
_BURST_SHARE = 0.6

_RETRY_S = 0.5

# Least size of a burst in bandwidth-delay products, with which slow start ends in the first half of the burst even if
# connections do not start at the same time.
_BURSTS_IN_FLIGHT = 4

# Shortest burst, seconds: a shorter one arrives in too few reads to be timed.
_LEAST_BURST_S = 0.02


@dataclass(frozen=True, slots=True)
class RecordingConfig:
    """How a path is recorded.

    Attributes:
        every_s: Interval between samples, seconds.
        traffic_bytes: Size of each sample's burst, bytes.
        payload_share: Share of a link's bits that are payload; recorded rates include the rest.
        duration_s: How long to record, seconds; infinite to record until interrupted.

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
            raise InputError(
                f"a sample every {self.every_s:g} s is too often", where="--every", valid="give 0.1 s or more"
            )
        if not self.duration_s > 0:
            raise InputError(
                f"a recording of {self.duration_s:g} s is not allowed", where="--duration", valid="give more than 0 s"
            )
        try:
            self.burst()
        except InputError as error:
            raise error.within("--traffic and --connections") from None

    def burst(self) -> BurstRequest:
        """Return the burst of one sample."""
        seconds = min(MOST_SECONDS, _BURST_SHARE * self.every_s)
        return BurstRequest(self.direction, self.traffic_bytes, seconds, self.connections)


class Recorder:
    """Samples a path into a recording.

    Args:
        recording: Open recording that samples are appended to.
        tell: Called with a line of text for each sample, and for each attempt that failed.
    """

    def __init__(self, config: RecordingConfig, recording: Recording, tell: Callable[[str], None]) -> None:
        self._config = config
        self._recording = recording
        self._tell = tell
        self._timeout_s = min(ANSWER_TIMEOUT_S, max(1.0, config.every_s))
        self._token = ""
        self._warned = False

    def record(self) -> None:
        """Measure the rate of the path once per interval, until the configured duration is over.

        If the other end cannot be reached, the sample is recorded as an outage; for the first sample this is an error.

        Raises:
            InputError: The other end does not answer the first request, or the bursts are too small to be timed.
            RunError: The responder is busy at the first request, or the file cannot be written.
        """
        first_s, config = self._recording.end_s, self._config
        # Time in which measurements failed is left out of the recording.
        start_s, left_out_s = time.monotonic(), 0.0
        number, due_s = 0, 0.0
        while due_s < config.duration_s:
            time.sleep(max(0.0, start_s + left_out_s + due_s - time.monotonic()))
            asked_s = time.monotonic()
            sample = self._sample(is_first=number == 0)
            if sample is None:
                time.sleep(_RETRY_S)
                left_out_s += time.monotonic() - asked_s
                continue
            time_s = asked_s - start_s - left_out_s
            self._recording.append(first_s + time_s, sample)
            self._tell(
                f"{first_s + time_s:.1f} s: {sample.bandwidth_bps / 1e6:.4g} Mbit/s, {1000 * sample.latency_s:.4g} ms"
            )
            number += 1
            # Samples that were due during a long measurement are skipped.
            passed_s = time.monotonic() - start_s - left_out_s
            due_s = config.every_s * max(round(due_s / config.every_s) + 1, int(passed_s / config.every_s))

    def _sample(self, *, is_first: bool) -> Sample | None:
        """Return a sample; None if the measurement failed, for example because the responder is busy."""
        latency_s = self._recording.latency_s or 0.0
        try:
            with Peer(self._config.address, self._timeout_s, self._token) as peer:
                self._token = peer.token
                latency_s = median(peer.round_trips_s(_ECHOES)) / 2
                arrivals, _ = peer.burst(self._config.burst())
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
        return Sample(rate_bps / self._config.payload_share, latency_s)

    def _check_size(self, rate_bps: float, latency_s: float, complete: bool) -> None:
        """Warn once if bursts are too short for TCP windows to open fully, or too short to be timed."""
        needed_bytes = rate_bps * max(_BURSTS_IN_FLIGHT * 2 * latency_s, _LEAST_BURST_S) / 8
        if complete and not self._warned and needed_bytes > self._config.traffic_bytes:
            self._warned = True
            self._tell(
                f"bursts of {self._config.traffic_bytes / 1e6:g} MB are too short for what this link carries, and can "
                f"show too little: give '--traffic {max(1.0, needed_bytes / 1e6):.0f} MB' or more"
            )
