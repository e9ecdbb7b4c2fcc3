"""What probes have shown of one link lately: latencies, and rates that it does not exceed."""

from collections import deque
from dataclasses import dataclass

# Time of which the states are kept, and time that one state stands for, seconds: a mean of all that was seen in it.
MEMORY_S, STATE_S = 900.0, 15.0


@dataclass(slots=True)
class ProbedState:
    """Means of what was seen in `STATE_S` seconds.

    Attributes:
        slot: Number of these seconds since the start of the run.
        latency_s: Mean latency, seconds.
        seconds_per_bit: Mean of the inverse of the highest likely rate, seconds per bit, as far as steps showed one.
    """

    slot: int
    latency_s: float = 0.0
    seconds_per_bit: float = 0.0
    _latencies: int = 0
    _rates: int = 0

    def add(self, latency_s: float, most_bps: float | None) -> None:
        """Add what one step has shown."""
        self._latencies += 1
        self.latency_s += (latency_s - self.latency_s) / self._latencies
        if most_bps is not None:
            self._rates += 1
            self.seconds_per_bit += (1 / most_bps - self.seconds_per_bit) / self._rates

    @property
    def most_bps(self) -> float:
        """Highest likely rate, bits per second; infinite if it is not known."""
        return 1 / self.seconds_per_bit if self.seconds_per_bit else float("inf")


class ProbedStates:
    """The states of the last `MEMORY_S` seconds."""

    def __init__(self) -> None:
        self._states: deque[ProbedState] = deque()

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, place: int) -> ProbedState:
        """Return a state; the oldest one is at place 0."""
        return self._states[place]

    def add(self, now_s: float, latency_s: float, most_bps: float | None) -> None:
        """Add what a step that ended at ``now_s`` has shown; the rate is None if it showed none."""
        slot = int(now_s // STATE_S)
        if not self._states or self._states[-1].slot != slot:
            self._states.append(ProbedState(slot))
        self._states[-1].add(latency_s, most_bps)
        self.forget(now_s)

    def forget(self, now_s: float) -> None:
        """Drop the states that are older than `MEMORY_S`."""
        while self._states and (self._states[0].slot + 1) * STATE_S <= now_s - MEMORY_S:
            self._states.popleft()

    def clear(self) -> None:
        """Drop all states."""
        self._states.clear()
