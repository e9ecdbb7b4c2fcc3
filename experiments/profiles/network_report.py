"""Formats the results of ``ropebridge profile network`` as JSON and as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from executor.profiling.message_times import MessageProfile
from experiments.profiles.cluster_file import MeasuredLink
from planner.scenario.effects import TCP
from traces.probe.path_profile import DirectionProfile, PathProfile
from traces.statistics import CONFIDENCE, Interval


def notes_on(path: PathProfile) -> list[str]:
    """Return remarks on the measured values: how to simulate the path, and rates that may be too low."""
    notes = [f"simulate with: {_effects(path)}"]
    for direction, found in path.directions.items():
        if found.short:
            counts = ", ".join(map(str, found.short))
            notes.append(
                f"{direction}, {counts} connections: the traffic was used up before windows had surely opened, "
                "so that the rate can be too low; give more '--traffic'"
            )
    return notes


def _effects(path: PathProfile) -> str:
    """Return the ``effects`` entry with which a scenario reproduces the TCP window that was measured."""
    round_trip_s = path.round_trip_s.median
    windows = [each.window_bytes(round_trip_s) for each in path.directions.values()]
    known = [each for each in windows if each is not None]
    if known:
        return f"effects: {{network: {{base: tcp, window: {min(known) / 1e6:.3g} MB}}}}"
    single_bps = max(each.rates_bps[min(each.rates_bps)].median for each in path.directions.values())
    if single_bps * round_trip_s / 8 > TCP.window_bytes:
        return "effects: {network: {base: tcp, window: unlimited}}"
    return "effects: {network: tcp}"


def document_of(path: PathProfile, messages: MessageProfile | None, links: Sequence[MeasuredLink]) -> dict[str, Any]:
    """Return all measurements in SI units, for JSON."""
    timed = None
    if messages is not None:
        arrival_s = {str(size): asdict(arrival) for size, arrival in messages.arrival_s.items()}
        timed = {"arrival_s": arrival_s, "ready_notice_s": asdict(messages.notice_s)}
    return {
        "confidence": CONFIDENCE,
        "round_trip_s": asdict(path.round_trip_s),
        "least_round_trip_s": path.least_round_trip_s,
        "directions": {
            name: _direction_document(found, path.round_trip_s.median) for name, found in path.directions.items()
        },
        "messages": timed,
        "links": [asdict(link) for link in links],
    }


def _direction_document(found: DirectionProfile, round_trip_s: float) -> dict[str, Any]:
    return {
        "payload_bps": {str(count): asdict(rate) for count, rate in found.rates_bps.items()},
        "full_windows_bytes": {str(count): full for count, full in found.full_windows_bytes.items()},
        "window_bytes": found.window_bytes(round_trip_s),
    }


def table_of(path: PathProfile, messages: MessageProfile | None, names: tuple[str, str]) -> list[str]:
    """Return the lines of a table; ``names`` are the names of this host and of the other one."""
    here, there = names
    lines = [
        f"medians; least and most of six rounds, which hold the median with {CONFIDENCE:.0%}",
        f"{'latency, one way':32}{_milliseconds(path.round_trip_s.scaled(0.5))}",
        f"{'  quickest':32}{1000 * path.least_round_trip_s / 2:8.4g} ms",
    ]
    titles: Mapping[str, str] = {"there": f"{here} to {there}", "back": f"{there} to {here}"}
    for direction, found in path.directions.items():
        lines.append(f"payload, {titles[direction]}")
        for count, rate in found.rates_bps.items():
            name = f"{count} connection{'s' if count > 1 else ''}"
            lines.append(f"  {name:30}{_megabits(rate)}")
        window = found.window_bytes(path.round_trip_s.median)
        if window is not None:
            lines.append(f"  {'a connection has under way':30}{window / 1e6:8.4g} MB at most")
    if messages is not None:
        lines.append(f"gloo, {titles['there']}, receives posted before")
        for size_bytes, arrival in messages.arrival_s.items():
            lines.append(f"  {f'{size_bytes:,} B arrive after':30}{_milliseconds(arrival)}")
        lines.append(f"{'a late receive costs, beside':32}{_milliseconds(messages.notice_s)}")
    return lines


def _milliseconds(time_s: Interval) -> str:
    return f"{1000 * time_s.median:8.4g} ms      ({1000 * time_s.least:.4g}-{1000 * time_s.most:.4g})"


def _megabits(rate_bps: Interval) -> str:
    return f"{rate_bps.median / 1e6:8.4g} Mbit/s  ({rate_bps.least / 1e6:.4g}-{rate_bps.most / 1e6:.4g})"
