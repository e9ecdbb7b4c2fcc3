"""``ropebridge traces record``: what it does; returns the text to print."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from experiments.runs.interrupts import CommandInterruptedError
from planner.scenario.effects import TCP_PAYLOAD_EFFICIENCY
from traces.common.units import parse_bytes, parse_duration_s
from traces.formats.files import read_trace
from traces.probe.address import parse_address
from traces.probe.burst_order import Direction
from traces.probe.peer import await_listener
from traces.probe.recorder import Recorder, RecordingConfig
from traces.probe.recording import Recording
from traces.statistics import describe


def record(
    address: str,
    output: Path,
    *,
    every: str,
    traffic: str,
    connections: int,
    reverse: bool,
    duration: str | None,
    as_json: bool,
    tell: Callable[[str], None],
) -> str:
    """Record until the time is over; without one until the command is interrupted, which is then no failure.

    Args:
        address: Of the responder.
        output: The trace; one that is there goes on.
        every: From one sample to the next, with its unit.
        traffic: Of each sample, with its unit.
        connections: Over which it goes.
        reverse: Whether to record the way from there to here.
        duration: How long, with its unit; None for no end.
        as_json: JSON, in SI units, instead of text.
        tell: Called with a line for each sample.

    Raises:
        InputError: Nobody answers, an option makes no sense, or the file cannot be written.
    """
    direction: Direction = "back" if reverse else "there"
    duration_s = math.inf if duration is None else parse_duration_s(duration)
    orders = RecordingConfig(
        parse_address(address),
        direction,
        parse_duration_s(every),
        parse_bytes(traffic),
        connections,
        TCP_PAYLOAD_EFFICIENCY,
        duration_s,
    )
    with Recording(output) as recording:
        before = recording.samples
        tell(
            f"{8 * orders.traffic_bytes / orders.every_s / 1e6:.3g} Mbit/s of traffic in the mean"
            + (f"; going on at {recording.end_s:.1f} s, after {before} samples" if before else "")
        )
        try:
            await_listener(orders.address)
            Recorder(orders, recording, tell).record()
        except CommandInterruptedError:
            if duration is not None or not recording.samples:
                raise
        samples = recording.samples
    statistics = describe(read_trace(output))
    if as_json:
        return json.dumps(
            {"path": str(output), "samples": samples, "new": samples - before, **asdict(statistics)}, indent=2
        )
    return (
        f"{output}: {samples} samples, {samples - before} of them new, {statistics.duration_s:g} s, "
        f"mean {statistics.mean_bps / 1e6:,.4g} Mbit/s"
    )
