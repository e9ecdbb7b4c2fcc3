"""How far a measurement is: a bar in a terminal, a line for each round elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(steps: int, tell: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Give what is called with a line about what comes next, so many times.

    Args:
        steps: How many times.
        tell: Called with these lines, without repetitions, where the standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield _without_repetitions(tell)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    shown = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # Drawn when something is done, not by a thread of its own, which would take time from what is measured.
    with Progress(*shown, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("", total=steps)
        begun = 0

        def begin(line: str) -> None:
            nonlocal begun
            bar.update(task, description=line, completed=begun, refresh=True)
            begun += 1

        yield begin
        bar.update(task, completed=steps, refresh=True)


def _without_repetitions(tell: Callable[[str], None]) -> Callable[[str], None]:
    last = ""

    def begin(line: str) -> None:
        nonlocal last
        if line != last:
            tell(line)
        last = line

    return begin
