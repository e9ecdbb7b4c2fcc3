"""``ropebridge traces show | convert | generate | record`` as functions, which return the text to print."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from experiments.runs.console import CommandInterruptedError
from planner.scenario.effects import TCP_PAYLOAD_EFFICIENCY
from traces.common.errors import InputError
from traces.common.units import parse_bytes, parse_duration_s
from traces.formats import FORMATS, format_of_suffix, read_trace, write_trace
from traces.generators import presets as generation
from traces.preemption.files import is_preemption, read_preemption
from traces.preemption.trace import describe_preemption
from traces.probe.bursts import Direction
from traces.probe.conversation import parse_address
from traces.probe.peer import await_listener
from traces.probe.recorder import Recorder, RecordingConfig
from traces.probe.recording import Recording
from traces.resample import resampled
from traces.statistics import TraceStatistics, describe, sparkline
from traces.trace import LinkTrace


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
    """Record a path's rates for a duration, or else until the command is interrupted, which then counts as success.

    Args:
        address: Address of the responder.
        output: The file of the trace; samples are appended to an existing one.
        every: Time from one sample to the next, with its unit.
        traffic: Bytes of each sample, with their unit.
        connections: Number of connections of a sample.
        reverse: Whether to record the direction from the other host to this one.
        duration: Duration of the recording, with its unit; None for no end.
        as_json: Whether to return JSON, in SI units, instead of text.
        tell: Called with a line for each sample.

    Raises:
        InputError: The address does not answer, an option is wrong, or the file cannot be written.
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


_NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})


def show(path: Path, *, loops: bool = True, as_json: bool = False, plot: Path | None = None) -> str:
    """Describe the trace of a link or of pre-emptions, in any format, and draw its rates into a PNG file.

    Args:
        path: The file to describe.
        loops: Whether the trace of a link starts again after its end.
        as_json: Whether to return JSON, in SI units, instead of text.
        plot: The PNG file; None draws none.

    Raises:
        InputError: The file is no trace, or the picture cannot be written.
    """
    if plot is not None and plot.suffix != ".png":
        raise InputError(f"'{plot}' is not a PNG file", where="--plot", valid="let its name end in .png")
    if is_preemption(path):
        if plot is not None:
            raise InputError("a trace of pre-emptions has no rates to draw", where="--plot", valid="leave it out")
        return _show_preemption(path, as_json)
    trace = read_trace(path, loops=loops)
    if plot is not None:
        # Imported here, since loading matplotlib takes longer than the rest of the command.
        from experiments.report.figures.links import plot_rates

        plot_rates({path.name: trace}, plot)
    statistics = describe(trace)
    if as_json:
        return json.dumps({"path": str(path), "loops": loops, **asdict(statistics)}, indent=2)
    return "\n".join((f"{path}", sparkline(trace), *_table(statistics, loops)))


def _show_preemption(path: Path, as_json: bool) -> str:
    trace = read_preemption(path)
    found = describe_preemption(trace)
    if as_json:
        return json.dumps({"path": str(path), **asdict(found)}, indent=2)
    between = f"{found.mean_between_departures_s:.4g} s" if found.mean_between_departures_s is not None else "-"
    rows = (
        ("duration", f"{found.duration_s:g} s, then who is there stays"),
        ("nodes", f"{found.nodes:,}, {found.mean_count:.4g} at a time ({found.least_count} to {found.most_count})"),
        ("arrivals", f"{found.arrivals:,}"),
        ("departures", f"{found.departures:,}, one every {between}" if found.departures else "0"),
        ("time without any", f"{found.empty_share:.3g} of the whole"),
    )
    return "\n".join((f"{path}", *(f"{name:<24}  {value}" for name, value in rows)))


def convert(source: Path, target: Path, *, to: str | None = None, step_s: float | None = None) -> str:
    """Write a trace file in another format, by default that of the target's suffix.

    With ``step_s`` the trace has mean rates over windows of this many seconds.

    Raises:
        InputError: The source is no trace, the format is unknown or cannot hold it, or the target cannot be written.
    """
    format_name = to or format_of_suffix(target)
    trace = read_trace(source)
    if step_s is not None:
        trace = resampled(trace, step_s)
    return _write(trace, target, format_name)


def generate(
    name: str,
    output: Path,
    *,
    duration_s: float,
    seed: int = 0,
    step_s: float = 1.0,
    format_name: str | None = None,
    parameters: Mapping[str, str] = _NO_PARAMETERS,
) -> str:
    """Generate a trace and write it, by default in the format of the file's suffix.

    Args:
        name: Name of a preset or a generator.
        output: The file to write.
        duration_s: Length of the trace, seconds.
        seed: Seed of the random numbers; equal seeds give equal traces.
        step_s: Time from one rate to the next, seconds.
        format_name: Format that replaces that of the suffix.
        parameters: Parameters of the generator, whose values have units; presets have none.

    Raises:
        InputError: There is no such name, a parameter is wrong, or the file cannot be written.
    """
    format_name = format_name or format_of_suffix(output)
    trace = generation.generate(name, parameters, duration_s=duration_s, seed=seed, step_s=step_s)
    return _write(trace, output, format_name)


def _write(trace: LinkTrace, path: Path, format_name: str) -> str:
    write_trace(trace, path, format_name)
    lost = trace.latency_s is not None and not FORMATS[format_name].keeps_latency
    note = f"; {format_name} has no place for the latency, which is lost" if lost else ""
    rate = _megabits(trace.mean_bps)
    return f"{path}: {format_name}, {trace.duration_s:g} s, {len(trace.times_s):,} pieces, mean {rate}{note}"


def _table(statistics: TraceStatistics, loops: bool) -> list[str]:
    rows = (
        ("duration", f"{statistics.duration_s:g} s, {'then again' if loops else 'then the last rate for ever'}"),
        ("pieces", f"{statistics.pieces:,}"),
        ("mean", _megabits(statistics.mean_bps)),
        ("minimum", _megabits(statistics.minimum_bps)),
        ("5 %", _megabits(statistics.p5_bps)),
        ("median", _megabits(statistics.median_bps)),
        ("95 %", _megabits(statistics.p95_bps)),
        ("maximum", _megabits(statistics.maximum_bps)),
        ("coefficient of variation", f"{statistics.coefficient_of_variation:.3g}"),
        ("time at zero", f"{statistics.zero_share:.3g} of the whole"),
    )
    return [f"{name:<24}  {value}" for name, value in rows]


def _megabits(rate_bps: float) -> str:
    return f"{rate_bps / 1e6:,.4g} Mbit/s"
