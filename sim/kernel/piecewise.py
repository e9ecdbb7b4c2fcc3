"""Rates over time as tables for compiled code: link rates in bits per second, device speeds relative to the profile.

A table is piecewise constant. After its duration it repeats from a given time on; a table of infinite duration keeps
its last rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numba import njit

from planner.scenario.cluster import LONGEST_OUTAGE_S
from planner.step.graph import Floats, Ints
from traces.trace import LinkTrace


@dataclass(frozen=True, slots=True, eq=False)
class RateTable:
    """A rate over time.

    Attributes:
        times_s: Start of each piece, seconds; the first is 0.
        rates: Rate of each piece.
        duration_s: When the table goes back to `repeat_from_s`, seconds; infinite if it never does.
        repeat_from_s: Start of the piece from which the table repeats, seconds.
    """

    times_s: Sequence[float] | Floats
    rates: Sequence[float] | Floats
    duration_s: float = math.inf
    repeat_from_s: float = 0.0

    def clipped(self, factor: float, ceiling: float) -> "RateTable":
        """Return the table with rates times ``factor``, and none above ``ceiling``."""
        rates = np.minimum(np.asarray(self.rates) * factor, ceiling)
        return replace(self, rates=rates)

    def without(self, gaps: Sequence[tuple[float, float]]) -> "RateTable":
        """Return the table with rate 0 in the ``gaps``, each from a start to an end, seconds of the run.

        Repetitions up to the last of these times become pieces of their own, so that the table grows with that time.
        """
        if not gaps:
            return self
        period_s = self.duration_s - self.repeat_from_s
        loops = math.isfinite(self.duration_s)
        cuts_s = np.unique([time_s for gap in gaps for time_s in gap if math.isfinite(time_s)])
        turns = max(0, math.ceil((cuts_s[-1] - self.repeat_from_s) / period_s)) if loops else 0
        times_s, rates = np.asarray(self.times_s, np.float64), np.asarray(self.rates, np.float64)
        repeated = times_s >= self.repeat_from_s
        shifts_s = period_s * np.arange(1, turns + 1)
        times_s = np.concatenate([times_s, np.add.outer(shifts_s, times_s[repeated]).ravel()])
        rates = np.concatenate([rates, np.tile(rates[repeated], turns)])
        places = np.searchsorted(times_s, cuts_s, side="right")
        new = times_s[places - 1] != cuts_s
        rates = np.insert(rates, places[new], rates[places[new] - 1])
        times_s = np.insert(times_s, places[new], cuts_s[new])
        for start_s, end_s in gaps:
            first, last = np.searchsorted(times_s, (start_s, end_s))
            rates[first:last] = 0.0
        if not loops or any(math.isinf(end_s) for _, end_s in gaps):
            return RateTable(times_s, rates)
        return RateTable(times_s, rates, self.duration_s + turns * period_s, self.repeat_from_s + turns * period_s)


def link_table(trace: LinkTrace) -> RateTable:
    """Return a trace's rates as a table."""
    duration_s = trace.duration_s if trace.loops else math.inf
    return RateTable(trace.times_s, trace.bandwidth_bps, duration_s)


_NONE = np.empty(0)


class RateTables(NamedTuple):
    """Several tables as arrays.

    Attributes:
        first: Index of each table's first piece, and the number of all pieces, [tables + 1].
        times_s: Start of each piece, seconds, [pieces].
        rate: Rate of each piece, [pieces].
        duration_s: Duration of each table, seconds, [tables].
        repeat_from_s: Time from which each table repeats, seconds, [tables].
    """

    first: Ints
    times_s: Floats
    rate: Floats
    duration_s: Floats
    repeat_from_s: Floats


def join_tables(tables: Sequence[RateTable]) -> RateTables:
    """Return the tables as arrays."""
    return RateTables(
        np.cumsum([0, *(len(table.times_s) for table in tables)], dtype=np.int64),
        np.concatenate([_NONE, *(table.times_s for table in tables)], dtype=np.float64),
        np.concatenate([_NONE, *(table.rates for table in tables)], dtype=np.float64),
        np.array([table.duration_s for table in tables], np.float64),
        np.array([table.repeat_from_s for table in tables], np.float64),
    )


@njit(cache=True)
def find_piece(tables: RateTables, table: int, time_s: float) -> tuple[int, float]:
    """Return the piece that holds at ``time_s``, and the shift of the table's times in this repetition, seconds."""
    shift_s = 0.0
    duration_s = tables.duration_s[table]
    if time_s >= duration_s:
        period_s = duration_s - tables.repeat_from_s[table]
        shift_s = period_s * (np.floor((time_s - duration_s) / period_s) + 1.0)
        if time_s - shift_s >= duration_s:
            shift_s += period_s
    first, end = tables.first[table], tables.first[table + 1]
    piece = first + np.searchsorted(tables.times_s[first:end], time_s - shift_s, side="right") - 1
    return max(piece, first), shift_s


@njit(cache=True)
def next_piece(tables: RateTables, table: int, piece: int, shift_s: float) -> tuple[int, float, float]:
    """Return the next piece, its shift in seconds and its start in seconds; the start is infinite if there is none."""
    if piece + 1 < tables.first[table + 1]:
        return piece + 1, shift_s, tables.times_s[piece + 1] + shift_s
    duration_s = tables.duration_s[table]
    if np.isinf(duration_s):
        return piece, shift_s, np.inf
    start_s = duration_s + shift_s
    repeat_from_s = tables.repeat_from_s[table]
    first, end = tables.first[table], tables.first[table + 1]
    back = first + np.searchsorted(tables.times_s[first:end], repeat_from_s, side="right") - 1
    return back, shift_s + duration_s - repeat_from_s, start_s


@njit(cache=True)
def holding(tables: RateTables, table: int, time_s: float) -> tuple[float, float]:
    """Return the rate at ``time_s``, and the time of the next change of the rate, seconds."""
    piece, shift_s = find_piece(tables, table, time_s)
    following, shift_s, change_s = next_piece(tables, table, piece, shift_s)
    # Rounding can put the end of a piece at or before ``time_s``; the next piece then applies.
    while change_s <= time_s:
        piece = following
        following, shift_s, change_s = next_piece(tables, table, piece, shift_s)
    return float(tables.rate[piece]), float(change_s)


@njit(cache=True)
def rate_at(tables: RateTables, table: int, time_s: float) -> float:
    """Return the rate at a time."""
    piece, _ = find_piece(tables, table, time_s)
    return float(tables.rate[piece])


@njit(cache=True)
def moved(tables: RateTables, table: int, start_s: float, end_s: float, ceiling: float) -> float:
    """Return the integral of the rate between two times, limited to ``ceiling``."""
    total, now_s = 0.0, start_s
    piece, shift_s = find_piece(tables, table, start_s)
    while now_s < end_s:
        rate = min(tables.rate[piece], ceiling)
        piece, shift_s, change_s = next_piece(tables, table, piece, shift_s)
        until_s = min(change_s, end_s)
        if until_s > now_s:
            total += rate * (until_s - now_s)
            now_s = until_s
    return total


@njit(cache=True)
def time_of(tables: RateTables, table: int, amount: float, start_s: float, ceiling: float) -> float:
    """Return the time at which ``amount`` has moved, from ``start_s`` on, at rates limited to ``ceiling``.

    Returns infinity if nothing moves for longer than the longest outage.
    """
    now_s = start_s
    if amount <= 0.0:
        return now_s
    moved_s = start_s
    piece, shift_s = find_piece(tables, table, start_s)
    while True:
        rate = min(tables.rate[piece], ceiling)
        piece, shift_s, change_s = next_piece(tables, table, piece, shift_s)
        if rate > 0.0:
            # Rounding must not move the end past a change of the rate: the next piece may be an outage.
            if now_s + amount / rate <= change_s or amount - rate * (change_s - now_s) <= 1e-12 * amount:
                return float(min(now_s + amount / rate, change_s))
            amount -= rate * max(change_s - now_s, 0.0)
            moved_s = change_s
        elif change_s - moved_s > LONGEST_OUTAGE_S:
            return np.inf
        now_s = max(now_s, change_s)


@njit(cache=True)
def resumes_s(tables: RateTables, table: int, time_s: float) -> float:
    """Return the first time from ``time_s`` on at which the rate is above zero; infinity if there is none in a day."""
    now_s = time_s
    piece, shift_s = find_piece(tables, table, time_s)
    while tables.rate[piece] <= 0.0:
        piece, shift_s, change_s = next_piece(tables, table, piece, shift_s)
        now_s = change_s
        if now_s - time_s > LONGEST_OUTAGE_S:
            return np.inf
    return now_s
