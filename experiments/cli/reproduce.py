"""``ropebridge reproduce``: a published system's claims against what we measure."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

from experiments.benches.result import BenchResult, plain_number
from experiments.reproductions.asteroid.reproduction import reproduce_asteroid
from experiments.reproductions.cannikin.reproduction import reproduce_cannikin
from experiments.reproductions.claims import Reproduction
from experiments.reproductions.cloudless.reproduction import reproduce_cloudless
from experiments.reproductions.deepcee.reproduction import reproduce_deepcee
from experiments.runs.folder import new_folder
from experiments.runs.machine import describe_machine
from traces.common.atomic import write_text_atomically
from traces.common.names import find_by_name

Reproduce = Callable[[bool, Callable[[str], None]], Reproduction]

REPRODUCTIONS: Mapping[str, Reproduce] = {
    "asteroid": reproduce_asteroid,
    "cannikin": reproduce_cannikin,
    "cloudless": reproduce_cloudless,
    "deepcee": reproduce_deepcee,
}


def reproduce(
    name: str, quick: bool, as_json: bool, output: Path | None, tell: Callable[[str], None]
) -> tuple[str, bool]:
    """Reproduce a system's claims; return what to print and whether every check holds.

    Args:
        name: One of `REPRODUCTIONS`.
        quick: Fewer settings and steps.
        as_json: Whether to print JSON.
        output: Folder for ``result.json`` and ``figure.png``, or None.
        tell: Takes a line about the progress.

    Raises:
        InputError: There is no such system, or the folder cannot be written to.
    """
    chosen = find_by_name(name, REPRODUCTIONS, "system")
    with new_folder(output) if output is not None else nullcontext() as folder:
        result = chosen(quick, tell)
        document = json.dumps({**result.document(), "machine": describe_machine()}, default=plain_number)
        if folder is not None:
            write_text_atomically(folder / "result.json", document)
            result.draw(folder / "figure.png")
    return document if as_json else result.text(), all(check.holds for check in result.checks)


def execute_reproduction(
    name: str, as_json: bool, output: Path | None, tell: Callable[[str], None]
) -> tuple[str, bool]:
    """Run a system and its rivals for real, beside the simulator; return what to print and whether they agree.

    Args:
        name: One of `REPRODUCTIONS`.
        as_json: Whether to print JSON.
        output: Folder for ``executed.json``, or None.
        tell: Takes a line about the progress.

    Raises:
        InputError: There is no such system, or the folder cannot be written to.
    """
    # Loads torch, which simulations do without.
    from experiments.reproductions.executed.comparisons import CONTESTS
    from experiments.reproductions.executed.execution import execute, executed_check

    contests = find_by_name(name, CONTESTS, "system")
    with new_folder(output) if output is not None else nullcontext() as folder:
        rows = [row for contest in contests() for row in execute(contest, tell)]
        result = BenchResult(rows, [executed_check(rows)])
        document = json.dumps({**result.document(), "machine": describe_machine()}, default=plain_number)
        if folder is not None:
            write_text_atomically(folder / "executed.json", document)
    return document if as_json else result.text(), all(check.holds for check in result.checks)
