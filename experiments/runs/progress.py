"""Shows the progress of runs, sweeps and measurements in a terminal, as lines, in TensorBoard and in Prometheus."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.runs.console import tell as tell_on_stderr
from planner.runs.record import Progress, ProgressCallback
from traces.common.atomic import missing_folders, remove_empty
from traces.common.errors import InputError
from traces.common.units import number_text

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

Tell = Callable[[str], None]

_RUN_LINE_EVERY_S = 1.0
_SHOWN_DECISIONS = 6
_SHOWN_STEPS = 60
_BARS = " ▁▂▃▄▅▆▇█"

_PORTS = 1 << 16

# Seconds between two lines about a sweep if there is no terminal.
SWEEP_LINE_EVERY_S = 10.0

# Redraws of a progress bar per second; more would take time from the workers.
_REFRESHES_PER_S = 2


def run_lines(tell: Tell) -> ProgressCallback:
    """Return a callback that reports the last step of each second, and each step at which the policy decides."""
    told_s = -_RUN_LINE_EVERY_S

    def watch(progress: Progress) -> None:
        nonlocal told_s
        is_last = progress.step + 1 == progress.steps
        if progress.change or is_last or time.monotonic() - told_s >= _RUN_LINE_EVERY_S:
            told_s = time.monotonic()
            tell(progress.text())

    return watch


@contextmanager
def showing_run(
    *, live: bool, tensorboard: Path | None, prometheus: str | None, tell: Tell
) -> Iterator[ProgressCallback | None]:
    """Yield a callback that shows each step of a run in all requested places; None if no place is requested.

    Args:
        live: Whether to show steps in the terminal, or as lines if standard error is no terminal.
        tensorboard: Folder for TensorBoard's scalars; None writes none.
        prometheus: ADDRESS:PORT at which Prometheus can scrape metrics; None serves none.
        tell: Called with each line.

    Raises:
        InputError: A package is missing, the folder cannot be written, or the address cannot be bound.
    """
    with ExitStack() as stack:
        sinks: list[ProgressCallback] = []
        if tensorboard is not None:
            sinks.append(stack.enter_context(_tensorboard(tensorboard)))
        if prometheus is not None:
            sinks.append(stack.enter_context(_prometheus(prometheus)))
        # Added last: once a step is shown as a line, the other places have it too.
        if live:
            sinks.append(stack.enter_context(_terminal_view()) if sys.stderr.isatty() else run_lines(tell))

        def watch(progress: Progress) -> None:
            for sink in list(sinks):
                try:
                    sink(progress)
                except Exception as error:
                    # A failing display must not end the training.
                    sinks.remove(sink)
                    tell(f"no longer shown: {type(error).__name__}: {error}")

        yield watch if sinks else None


@contextmanager
def _terminal_view() -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.live import Live
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    times_s: deque[float] = deque(maxlen=_SHOWN_STEPS)
    decisions: deque[str] = deque(maxlen=_SHOWN_DECISIONS)

    def show(progress: Progress) -> None:
        times_s.append(progress.step_s)
        if progress.change:
            decisions.append(f"step {progress.step + 1}: {progress.change}")
        lines = Table.grid(expand=True)
        lines.add_row(ProgressBar(total=progress.steps, completed=progress.step + 1))
        times = f"step times {sparkline(list(times_s))} up to {number_text(max(times_s))} s"
        for line in (progress.text(), times, *decisions):
            lines.add_row(Text(line))
        view.update(Panel(lines, title="ropebridge"))

    with Live(console=Console(stderr=True), refresh_per_second=4) as view:
        yield show


def sparkline(times_s: list[float]) -> str:
    """Return one bar character per time; its height is the time's share of the longest one."""
    most_s = max(times_s)
    return "".join(_BARS[round((len(_BARS) - 1) * each / most_s) if most_s > 0 else 0] for each in times_s)


def _scalars(progress: Progress) -> dict[str, float]:
    found = {"step_seconds": progress.step_s, "samples_per_second": progress.samples_per_s}
    if progress.loss is not None:
        found["loss"] = progress.loss
    return {**found, "devices_away": float(len(progress.away)), "decided": float(bool(progress.change))}


@contextmanager
def _tensorboard(folder: Path) -> Iterator[ProgressCallback]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "TensorBoard is not installed", where="--tensorboard", valid="pip install 'ropebridge[live]'"
        ) from None
    missing = missing_folders(folder)
    before = set(folder.glob("*"))
    try:
        writer = SummaryWriter(str(folder))
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", where=f"--tensorboard {folder}", valid="choose another folder"
        ) from None

    own = set(folder.glob("*")) - before

    def watch(progress: Progress) -> None:
        own.clear()
        for name, value in _scalars(progress).items():
            writer.add_scalar(f"ropebridge/{name}", value, progress.step)
        if progress.change:
            writer.add_text("ropebridge/decisions", progress.change, progress.step)
        writer.flush()

    try:
        yield watch
    finally:
        writer.close()
        # A run that was refused leaves nothing.
        for path in own:
            path.unlink(missing_ok=True)
        remove_empty(missing if own else ())


@contextmanager
def _prometheus(address: str) -> Iterator[ProgressCallback]:
    try:
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
    except ImportError:
        raise InputError(
            "prometheus_client is not installed", where="--prometheus", valid="pip install 'ropebridge[live]'"
        ) from None
    host, _, port = address.rpartition(":")
    # IPv6 addresses contain colons.
    host = host.removeprefix("[").removesuffix("]")
    registry = CollectorRegistry()
    try:
        if not host or not (port.isdecimal() and int(port) < _PORTS):
            raise ValueError("it is not a host and a port")
        server, thread = start_http_server(int(port), host, registry)
    except (OSError, ValueError) as error:
        raise InputError(
            f"'{address}' cannot be bound: {error}",
            where="--prometheus",
            valid="give ADDRESS:PORT, such as 127.0.0.1:9400",
        ) from None
    steps = Counter("ropebridge_steps", "Steps that all devices have finished.", registry=registry)
    decisions = Counter("ropebridge_decisions", "Decisions of the policy.", registry=registry)
    gauges: dict[str, Gauge] = {}

    def watch(progress: Progress) -> None:
        steps.inc()
        scalars = _scalars(progress)
        decisions.inc(scalars.pop("decided"))
        for name, value in scalars.items():
            if name not in gauges:
                gauges[name] = Gauge(f"ropebridge_{name}", f"Of the last step: {name}.", registry=registry)
            gauges[name].set(value)

    try:
        yield watch
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# A callback for finished points of a sweep: takes how many finished since the last call, and how many of these failed.
SweepWatch = Callable[[int, int], None]


def sweep_lines(
    left: int, before: int, tell: Tell = tell_on_stderr, clock_s: Callable[[], float] = time.monotonic
) -> SweepWatch:
    """Return a callback that reports the progress of a sweep as lines, at least `SWEEP_LINE_EVERY_S` seconds apart.

    ``left`` points are to be carried out, and ``before`` were done already. ``clock_s`` returns the time in seconds.
    """
    start_s = told_s = clock_s()
    done = failed = 0

    def watch(more: int, more_failed: int) -> None:
        nonlocal told_s, done, failed
        done += more
        failed += more_failed
        now_s = clock_s()
        # The time that a point takes is unknown until the first one is done.
        if now_s - told_s >= SWEEP_LINE_EVERY_S and 0 < done < left:
            told_s, per_s = now_s, done / (now_s - start_s)
            problem = f", {failed} failed" if failed else ""
            tell(
                f"{before + done} of {before + left} points{problem}, {number_text(per_s)} points/s, "
                f"{duration_text((left - done) / per_s)} left"
            )

    return watch


@contextmanager
def showing_sweep(left: int, points: int) -> Iterator[SweepWatch]:
    """Yield a callback that shows a sweep's progress on standard error; ``left`` of ``points`` points are to do."""
    before = points - left
    tell_on_stderr(f"{points} points" + (f", {before} of them done already" if before else ""))
    if not sys.stderr.isatty() or not left:
        yield sweep_lines(left, before)
        return
    from rich.progress import MofNCompleteColumn, TextColumn

    shown = (MofNCompleteColumn(), TextColumn("{task.fields[failed]}"))
    with _bar(*shown, refresh_per_second=_REFRESHES_PER_S, speed_estimate_period=60) as bar:
        task = bar.add_task("", total=points, completed=before, failed="")
        failed = 0

        def watch(more: int, more_failed: int) -> None:
            nonlocal failed
            failed += more_failed
            bar.update(task, advance=more, failed=f"{failed} failed" if failed else "")

        yield watch


@contextmanager
def showing_rounds(rounds: int, tell: Tell) -> Iterator[Tell]:
    """Yield a callback to call with a line of text before each of ``rounds`` rounds of a measurement.

    In a terminal it moves a progress bar; otherwise it calls ``tell``, once for equal consecutive lines.
    """
    if not sys.stderr.isatty():
        last = ""

        def tell_once(line: str) -> None:
            nonlocal last
            if line != last:
                tell(line)
            last = line

        yield tell_once
        return
    from rich.progress import TextColumn

    # The bar is drawn at each call: a thread that refreshes it would take processor time from the measurement.
    with _bar(TextColumn("{task.description}"), auto_refresh=False) as bar:
        task = bar.add_task("", total=rounds)
        begun = 0

        def begin(line: str) -> None:
            nonlocal begun
            bar.update(task, description=line, completed=begun, refresh=True)
            begun += 1

        yield begin
        bar.update(task, completed=rounds, refresh=True)


def _bar(*columns: Any, **options: Any) -> "Bar":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(BarColumn(), *columns, *times, console=Console(stderr=True), **options)


def duration_text(seconds: float) -> str:
    """Format seconds in common units: ``45 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
