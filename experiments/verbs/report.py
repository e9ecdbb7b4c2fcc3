"""The verbs ``ropebridge report`` and ``compare``: runs or a sweep as page, figure, file for Perfetto, or table."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report.data.sweep_points import SweptPoints, is_sweep, read_swept_points, read_swept_table
from experiments.runs.console import check_targets
from experiments.runs.folder import read_record, reading, summarise
from planner.runs.record import RunRecord
from traces.common.atomic import written_together
from traces.common.errors import InputError
from traces.common.units import number_text


def compare(folders: Sequence[Path], as_json: bool) -> str:
    """Return a table of the runs in ``folders`` as text or JSON, one row per run."""
    with reading(", ".join(map(str, folders))):
        rows = compare_records(list(map(read_record, folders)), list(map(str, folders)))
        return json.dumps(rows) if as_json else _table(rows)


def compare_records(records: Sequence[RunRecord], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row of metrics for each run; ratios are relative to the first run."""
    summaries = list(map(summarise, records))
    first = summaries[0]
    return [
        {
            "run": name,
            "backend": summary["backend"],
            "emulator": summary["emulator"],
            "network_effects": summary["network_effects"],
            "strategy": summary["strategy"],
            "policy": summary["policy"],
            "decisions": summary["decisions"],
            "step_s": summary["step_s"],
            "step_ratio": summary["step_s"] / first["step_s"],
            "samples_per_s": summary["samples_per_s"],
            "throughput_ratio": summary["samples_per_s"] / first["samples_per_s"],
            "bubble_ratio": summary["bubble_ratio"],
            "wan_bytes": summary["wan_bytes"],
        }
        for name, summary in zip(names, summaries, strict=True)
    ]


# Maps the key of a row to the column's heading and to the heading's unit, in multiples of the key's unit.
_COLUMNS: Mapping[str, tuple[str, float]] = {
    "run": ("run", 1),
    "backend": ("backend", 1),
    "emulator": ("links", 1),
    "strategy": ("strategy", 1),
    "policy": ("policy", 1),
    "step_s": ("step s", 1),
    "step_ratio": ("ratio", 1),
    "samples_per_s": ("samples/s", 1),
    "throughput_ratio": ("ratio", 1),
    "bubble_ratio": ("bubble %", 0.01),
    "wan_bytes": ("WAN MB", 1e6),
    "decisions": ("decisions", 1),
}


def _table(rows: list[dict[str, Any]]) -> str:
    columns = []
    for name, (heading, unit) in _COLUMNS.items():
        values = [row[name] for row in rows]
        if name == "emulator":
            # A simulation has no emulator, but effects on the network.
            values = [row["emulator"] or row["network_effects"] for row in rows]
        is_text = any(isinstance(value, str) for value in values)
        cells = [str(value or "-") if is_text or value is None else number_text(value / unit) for value in values]
        width = max(map(len, (heading, *cells)))
        columns.append([f"{cell:{'<' if is_text else '>'}{width}}" for cell in (heading, *cells)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


_KINDS = (".html", ".png", ".svg", ".json")


def report(folders: Sequence[Path], outputs: Sequence[Path]) -> str:
    """Write the runs or the sweep in ``folders`` into each of ``outputs``; return their paths, a line each.

    Args:
        folders: Run folders, and folders that contain several runs; or the folder of one sweep.
        outputs: Files to write, whose suffixes determine their kinds; if empty, ``report.html`` in the first folder.

    Raises:
        InputError: A folder holds no run, an output has an unknown suffix, or it cannot be written.
    """
    targets = list(outputs) or [folders[0] / "report.html"]
    for target in targets:
        _check_kind(target)
    if any(map(is_sweep, folders)):
        _report_sweep(folders, targets)
    else:
        runs = [run for folder in folders for run in _runs(folder)]
        with reading(", ".join(map(str, runs))):
            report_records(list(map(read_record, runs)), names_of(runs), targets)
    return "\n".join(map(str, targets))


def report_records(records: Sequence[RunRecord], names: Sequence[str], targets: Sequence[Path]) -> None:
    """Write runs into each of ``targets``, whose suffixes determine their kinds.

    Raises:
        InputError: A target has an unknown suffix or cannot be written. No target is written in this case.
    """
    for target in targets:
        _check_kind(target)
    check_targets(targets)
    with written_together():
        for target in targets:
            _write(records, names, target)


def _report_sweep(folders: Sequence[Path], targets: Sequence[Path]) -> None:
    if len(folders) > 1:
        problem = f"a sweep is reported by itself, but {len(folders)} folders are given"
        raise InputError(problem, where="DIR", valid="name one sweep, or run folders only")
    for target in targets:
        if target.suffix == ".json":
            problem = f"a sweep has no events to write into '{target}'"
            raise InputError(problem, where="--output", valid="let the name end in .html, .png or .svg")
    table = read_swept_table(folders[0])
    pages = [target for target in targets if table.kind == "backtest" and target.suffix == ".html"]
    drawn = [target for target in targets if target not in pages]
    points = read_swept_points(folders[0]) if drawn else None
    check_targets(targets)
    with written_together():
        for target in pages:
            from experiments.report.html.backtest_page import write_backtest_page

            write_backtest_page(table, target)
        for target in drawn:
            assert points is not None
            _write_sweep(points, target)


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a unique name for each run: its folder's name, preceded by the parent folder's if several are equal."""
    short = [folder.resolve().name for folder in folders]
    long = ["/".join(folder.resolve().parts[-2:]) for folder in folders]
    count = Counter(short)
    return numbered([own if count[own] == 1 else more for own, more in zip(short, long, strict=True)])


def numbered(names: Sequence[str]) -> list[str]:
    """Return the names; a name that occurs more than once gets its position among all names, as in ``real (2)``."""
    count = Counter(names)
    return [name if count[name] == 1 else f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _write_sweep(points: SweptPoints, path: Path) -> None:
    from experiments.report.figures.sweep_figure import draw_sweep
    from experiments.report.html.sweep_page import write_sweep_page

    if path.suffix == ".html":
        write_sweep_page(points, path)
    else:
        draw_sweep(points, path)


def _write(records: Sequence[RunRecord], names: Sequence[str], path: Path) -> None:
    if path.suffix == ".html":
        from experiments.report.html.run_page import write_run_page

        write_run_page(records, names, path)
    elif path.suffix == ".json":
        from experiments.report.perfetto import write_perfetto

        write_perfetto(records, path)
    else:
        from experiments.report.figures.run_figure import draw_runs

        draw_runs(records, path, names=names)


def _check_kind(target: Path) -> None:
    if target.suffix not in _KINDS:
        raise InputError(
            f"'{target}' has an unknown suffix",
            where="--output",
            valid="let its name end in .html (the page), .png or .svg (a figure) or .json (for ui.perfetto.dev)",
        )


def _runs(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run, else the runs in it."""
    if (folder / "summary.json").is_file() or not folder.is_dir():
        return [folder]
    return sorted(summary.parent for summary in folder.glob("*/summary.json")) or [folder]
