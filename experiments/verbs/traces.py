"""The verbs ``ropebridge traces show | convert | generate | record`` as functions, which return the text to print."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import isinf
from pathlib import Path

from experiments.runs.console import CommandInterruptedError
from traces.common.errors import InputError
from traces.formats import FORMATS, format_of_suffix, read_trace, write_trace
from traces.generators import presets as generation
from traces.preemption.files import is_preemption, read_preemption
from traces.preemption.trace import describe_preemption
from traces.probe.peer import await_listener
from traces.probe.recorder import Recorder, RecordingConfig
from traces.probe.recording import Recording
from traces.resample import resampled
from traces.statistics import TraceStatistics, describe, sparkline
from traces.trace import LinkTrace


def record(config: RecordingConfig, output: Path, as_json: bool, tell: Callable[[str], None]) -> str:
    """Record the rates of a network path; without a duration until the command is interrupted, which is no error.

    Args:
        config: Address, direction, interval, size and duration of the recording.
        output: The file of the trace; samples are appended to an existing one.
        as_json: Whether to return JSON, in SI units, instead of text.
        tell: Called with a line for each sample.

    Raises:
        InputError: The address does not answer, or the file cannot be written.
    """
    with Recording(output) as recording:
        before = recording.samples
        tell(
            f"{8 * config.traffic_bytes / config.every_s / 1e6:.3g} Mbit/s of traffic in the mean"
            + (f"; going on at {recording.end_s:.1f} s, after {before} samples" if before else "")
        )
        try:
            await_listener(config.address)
            Recorder(config, recording, tell).record()
        except CommandInterruptedError:
            if not isinf(config.duration_s) or not recording.samples:
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


def show(path: Path, *, loops: bool = True, as_json: bool = False, plot: Path | None = None) -> str:
    """Return statistics of a trace of link rates or of pre-emptions, in any format, and draw the rates.

    Args:
        path: The file to describe.
        loops: Whether the trace of a link starts again after its end.
        as_json: Whether to return JSON, in SI units, instead of text.
        plot: The PNG file to draw into; None draws nothing.

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
    statistics = describe(trace)
    if as_json:
        text = json.dumps({"path": str(path), "loops": loops, **asdict(statistics)}, indent=2)
    else:
        text = "\n".join((f"{path}", sparkline(trace), *_table(statistics, loops)))
    if plot is not None:
        # Imported here, since loading matplotlib takes longer than the rest of the command.
        from experiments.report.figures.links import plot_rates

        plot_rates({path.name: trace}, plot)
    return text


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
    """Write a trace file in the format ``to``, by default the format of the target's suffix.

    With ``step_s`` the written trace has mean rates over windows of this many seconds.

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
    format_name: str | None = None,
    parameters: Mapping[str, str] | None = None,
    *,
    duration_s: float,
    seed: int = 0,
    step_s: float = 1.0,
) -> str:
    """Generate a trace and write it; return a line about it.

    Args:
        name: Name of a preset or a generator.
        output: The file to write.
        format_name: Name of the file's format; None for the format of the suffix.
        parameters: Parameters of the generator, as text with units; a preset has none.
        duration_s: Length of the trace, seconds.
        seed: Seed of the random numbers; equal seeds give equal traces.
        step_s: Time from one rate to the next, seconds.

    Raises:
        InputError: There is no such name, a parameter is not valid, or the file cannot be written.
    """
    format_name = format_name or format_of_suffix(output)
    trace = generation.generate(name, parameters or {}, duration_s=duration_s, seed=seed, step_s=step_s)
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
