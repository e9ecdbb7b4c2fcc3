"""LinkTrace: the rate of one link over time, piecewise constant and integrated exactly."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from traces.common.errors import InputError

FloatArray = npt.NDArray[np.float64]


# Upper limit on the bits of one period, above which a unit must be wrong: 100 Gbit/s for a year are 3e18 bits.
_MOST_BITS = 1e20

# Share of a time by which rounding may put it on the wrong side of a piece's end.
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class LinkTrace:
    """The bandwidth (and optionally latency) of a link over time.

    Piece ``i`` holds from ``times_s[i]`` up to ``times_s[i + 1]``, the last one up to ``duration_s``. After
    ``duration_s`` a trace with ``loops`` starts again. Without ``loops`` its last piece holds for ever; with ``ends``
    that continuation is unknown, and callers must refuse runs that last longer.

    Attributes:
        times_s: Starts of the pieces, seconds, shape (n,), rising, the first 0.
        bandwidth_bps: Rate of each piece, bits per second, shape (n,), not negative; 0 is an outage.
        duration_s: End of the last piece, seconds.
        latency_s: One-way latency of each piece, seconds, shape (n,), or None where it was not recorded.
        loops: Whether the trace repeats after ``duration_s``.
        ends: Whether nothing is known after ``duration_s``; only without ``loops``.
    """

    times_s: FloatArray
    bandwidth_bps: FloatArray
    duration_s: float
    latency_s: FloatArray | None = None
    loops: bool = True
    ends: bool = False

    def __post_init__(self) -> None:
        for name in ("times_s", "bandwidth_bps", "latency_s"):
            values = getattr(self, name)
            if values is not None:
                array = np.array(values, dtype=np.float64)
                array.setflags(write=False)
                object.__setattr__(self, name, array)
        object.__setattr__(self, "duration_s", float(self.duration_s))
        _check(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LinkTrace):
            return NotImplemented
        same_latency = (self.latency_s is None) == (other.latency_s is None)
        if same_latency and self.latency_s is not None and other.latency_s is not None:
            same_latency = np.array_equal(self.latency_s, other.latency_s)
        return (
            same_latency
            and np.array_equal(self.times_s, other.times_s)
            and np.array_equal(self.bandwidth_bps, other.bandwidth_bps)
            and (self.duration_s, self.loops, self.ends) == (other.duration_s, other.loops, other.ends)
        )

    def __hash__(self) -> int:
        return hash((self.times_s.tobytes(), self.bandwidth_bps.tobytes(), self.duration_s, self.loops, self.ends))

    @cached_property
    def _cumulative_bits(self) -> FloatArray:
        """Bits that the link carries from time 0 to each piece's start, and to the end; shape (n + 1,)."""
        bits = self.bandwidth_bps * np.diff(self.times_s, append=self.duration_s)
        return np.concatenate(([0.0], np.cumsum(bits)))

    @cached_property
    def mean_bps(self) -> float:
        """Mean rate over one period, bits per second."""
        return float(self._cumulative_bits[-1] / self.duration_s)

    def piece_at(self, time_s: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """Return the index of the piece that holds at each time (seconds from the start)."""
        return self._locate(np.asarray(time_s, dtype=np.float64))[0]

    def bandwidth_at(self, time_s: npt.ArrayLike) -> FloatArray:
        """Return the rate at each time, bits per second."""
        return self.bandwidth_bps[self.piece_at(time_s)]

    def rate_until(self, time_s: float) -> tuple[float, float]:
        """Return the rate at a time, bits per second, and a time until which it holds, seconds.

        The second is the end of the piece less a margin for rounding, so that it may lie before ``time_s``. It is
        infinite in the last piece of a trace that does not loop.
        """
        piece, _, start_s = self._locate(np.asarray(time_s, np.float64))
        if piece + 1 < len(self.times_s):
            end_s = float(start_s + self.times_s[piece + 1])
        else:
            end_s = float(start_s + self.duration_s) if self.loops else math.inf
        return float(self.bandwidth_bps[piece]), end_s - _ROUNDING * abs(time_s)

    def bits_between(self, start_s: npt.ArrayLike, end_s: npt.ArrayLike) -> FloatArray:
        """Return the bits that the link carries between two times: the exact integral of the rate.

        Times may have any shapes that broadcast against each other, in which the bits are returned.
        """
        start_s, end_s = np.asarray(start_s, np.float64), np.asarray(end_s, np.float64)
        return self._bits_until(end_s) - self._bits_until(start_s)

    def time_to_send(self, bits: npt.ArrayLike, start_s: npt.ArrayLike) -> FloatArray:
        """Return the time that the link needs from ``start_s`` on to carry ``bits``, seconds.

        The time is the shortest one: bits that are complete exactly when an outage begins do not wait for the end of
        the outage. It is infinite if the link never carries so many bits. ``bits`` and ``start_s`` may have any shapes
        that broadcast against each other.
        """
        bits, start_s = np.broadcast_arrays(np.asarray(bits, np.float64), np.asarray(start_s, np.float64))
        target_bits = self._bits_until(start_s) + bits
        duration_s = self._time_of_bits(target_bits) - start_s
        return np.where(bits <= 0, 0.0, np.maximum(duration_s, 0.0))

    def _locate(self, time_s: FloatArray) -> tuple[npt.NDArray[np.intp], FloatArray, FloatArray]:
        """Return the piece that holds at each time, and what `_fold` returns."""
        local_s, start_s = self._fold(time_s)
        return np.searchsorted(self.times_s, local_s, side="right") - 1, local_s, start_s

    def _fold(self, time_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Split times into (time since the start of its period, that start); without ``loops`` all starts are 0."""
        if not self.loops:
            return time_s, np.zeros_like(time_s)
        periods = np.floor_divide(time_s, self.duration_s)
        local_s = np.clip(time_s - periods * self.duration_s, 0.0, np.nextafter(self.duration_s, 0.0))
        return local_s, periods * self.duration_s

    def _bits_until(self, time_s: FloatArray) -> FloatArray:
        """Return the bits carried from time 0 to ``time_s``."""
        piece, local_s, start_s = self._locate(time_s)
        before_bits: FloatArray = start_s / self.duration_s * self._cumulative_bits[-1]
        inside_bits = self.bandwidth_bps[piece] * (local_s - self.times_s[piece])
        return before_bits + (self._cumulative_bits[piece] + inside_bits)

    def _time_of_bits(self, bits: FloatArray) -> FloatArray:
        """Return the earliest time by which ``bits`` have been carried since time 0: the inverse of `_bits_until`."""
        # Tolerance for rounding in `bits`: without it, the last bit before an outage could appear to be carried after
        # the outage.
        settled_bits = bits - 8 * np.spacing(bits)
        period_bits = float(self._cumulative_bits[-1])
        local_bits, periods = bits, np.zeros_like(bits)
        if self.loops and period_bits > 0:
            periods = np.maximum(np.ceil(settled_bits / period_bits) - 1, 0.0)
            local_bits = bits - periods * period_bits
            # Keep the value inside the period despite rounding: otherwise a trace with an outage at one end could never
            # complete a fraction of a bit.
            settled_bits = np.clip(settled_bits - periods * period_bits, np.nextafter(0.0, 1.0), period_bits)
        piece = np.searchsorted(self._cumulative_bits, settled_bits, side="left") - 1
        piece = np.clip(piece, 0, len(self.times_s) - 1)
        rest_bits = np.maximum(local_bits - self._cumulative_bits[piece], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            inside_s = np.where(rest_bits > 0, rest_bits / self.bandwidth_bps[piece], 0.0)
        start_s: FloatArray = periods * self.duration_s + self.times_s[piece]
        return start_s + inside_s


def _check(trace: LinkTrace) -> None:
    times_s, rates = trace.times_s, trace.bandwidth_bps
    if times_s.ndim != 1 or len(times_s) == 0:
        raise InputError("the trace has no rows", valid="give at least one time with a rate")
    latency_s = times_s if trace.latency_s is None else trace.latency_s
    if not rates.shape == latency_s.shape == times_s.shape:
        raise InputError("times, rates and latencies differ in number", valid="give one of each per row")
    for name, values in (("time", times_s), ("rate", rates), ("latency", trace.latency_s)):
        if values is None:
            continue
        bad = np.flatnonzero(~np.isfinite(values) | (values < 0))
        if len(bad):
            row = int(bad[0])
            raise InputError(
                f"{name} {values[row]:g} in row {row + 1}",
                valid=f"every {name} must be finite and not negative",
            )
    if times_s[0] != 0:
        raise InputError(f"the first time is {times_s[0]:g} s", valid="times start at 0 s")
    backward = np.flatnonzero(np.diff(times_s) <= 0)
    if len(backward):
        row = int(backward[0]) + 1
        raise InputError(
            f"time goes from {times_s[row - 1]:g} s to {times_s[row]:g} s in row {row + 1}",
            valid="times must rise from row to row",
        )
    if trace.loops and trace.ends:
        raise InputError("the trace both loops and ends", valid="choose one of the two")
    if not np.isfinite(trace.duration_s) or trace.duration_s <= times_s[-1]:
        raise InputError(
            f"the trace lasts {trace.duration_s:g} s but its last row starts at {times_s[-1]:g} s",
            valid="the duration must be finite and later than the last row",
        )
    if not rates.max() * trace.duration_s < _MOST_BITS:
        raise InputError(
            f"the trace carries up to {rates.max():g} bit/s for {trace.duration_s:g} s",
            valid=f"a trace carries less than {_MOST_BITS:g} bits in all: check its units",
        )
