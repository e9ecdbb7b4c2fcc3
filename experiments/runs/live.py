"""Looking at a run while it goes on: lines, a view in the terminal, and what other tools read."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from planner.runs.record import Progress, ProgressCallback
from traces.common.errors import InputError

_LINES_EVERY_S = 1.0
_DECISIONS = 6
_STEPS = 60
_BARS = " ▁▂▃▄▅▆▇█"


def telling(tell: Callable[[str], None]) -> ProgressCallback:
    """Return what tells a line for the last step of each second, and for each step that something is decided at."""
    told_s = -_LINES_EVERY_S

    def watch(progress: Progress) -> None:
        nonlocal told_s
        is_last = progress.step + 1 == progress.steps
        if progress.change or is_last or time.monotonic() - told_s >= _LINES_EVERY_S:
            told_s = time.monotonic()
            tell(progress.text())

    return watch


@contextmanager
def watching(
    *, live: bool, tensorboard: Path | None, prometheus: str | None, tell: Callable[[str], None]
) -> Iterator[ProgressCallback | None]:
    """Give what shows a run wherever it is asked for; None if nowhere.

    Args:
        live: In the terminal; as lines where the standard error output is none.
        tensorboard: Folder for TensorBoard's scalars, or None.
        prometheus: ADDRESS:PORT at which to be scraped, or None.
        tell: Prints a line.

    Raises:
        InputError: A package is missing, or the address cannot be had.
    """
    with ExitStack() as stack:
        sinks: list[ProgressCallback] = []
        if live:
            sinks.append(stack.enter_context(_in_terminal()) if sys.stderr.isatty() else telling(tell))
        if tensorboard is not None:
            sinks.append(stack.enter_context(_tensorboard(tensorboard)))
        if prometheus is not None:
            sinks.append(stack.enter_context(_prometheus(prometheus)))

        def watch(progress: Progress) -> None:
            for sink in list(sinks):
                try:
                    sink(progress)
                except Exception as error:
                    # The training is worth more than a look at it.
                    sinks.remove(sink)
                    tell(f"no longer shown: {type(error).__name__}: {error}")

        yield watch if sinks else None


@contextmanager
def _in_terminal() -> Iterator[ProgressCallback]:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    times_s: deque[float] = deque(maxlen=_STEPS)
    decisions: deque[str] = deque(maxlen=_DECISIONS)

    def show(progress: Progress) -> None:
        times_s.append(progress.step_s)
        if progress.change:
            decisions.append(f"step {progress.step + 1}: {progress.change}")
        parts: list[RenderableType] = [
            ProgressBar(total=progress.steps, completed=progress.step + 1),
            Text(progress.text()),
            Text(f"step times {sparkline(list(times_s))} up to {max(times_s):.3g} s"),
            *map(Text, decisions),
        ]
        lines = Table.grid(expand=True)
        for part in parts:
            lines.add_row(part)
        view.update(Panel(lines, title="ropebridge"))

    with Live(console=Console(stderr=True), refresh_per_second=4) as view:
        yield show


def sparkline(times_s: list[float]) -> str:
    """Return a line of bars, from nothing to the longest time, seconds."""
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
    try:
        writer = SummaryWriter(str(folder))
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", where=f"--tensorboard {folder}", valid="choose a place that can"
        ) from None

    def watch(progress: Progress) -> None:
        for name, value in _scalars(progress).items():
            writer.add_scalar(f"ropebridge/{name}", value, progress.step)
        if progress.change:
            writer.add_text("ropebridge/decisions", progress.change, progress.step)
        writer.flush()

    try:
        yield watch
    finally:
        writer.close()


@contextmanager
def _prometheus(address: str) -> Iterator[ProgressCallback]:
    try:
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
    except ImportError:
        raise InputError(
            "prometheus_client is not installed", where="--prometheus", valid="pip install 'ropebridge[live]'"
        ) from None
    host, _, port = address.rpartition(":")
    # IPv6 has its own colons.
    host = host.removeprefix("[").removesuffix("]")
    registry = CollectorRegistry()
    try:
        if not host:
            raise ValueError("it names no interface")
        server, thread = start_http_server(int(port), host, registry)
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"'{address}' cannot be had: {error}",
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
