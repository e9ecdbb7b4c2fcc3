"""``ropebridge compare``: runs side by side, against the first of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.runs.folder import read_record, summarise


def compare(folders: Sequence[Path], as_json: bool) -> str:
    """Return a table of the runs in ``folders``: a row per run."""
    rows = compare_summaries([(str(folder), summarise(read_record(folder))) for folder in folders])
    return json.dumps(rows) if as_json else _table(rows)


def compare_summaries(summaries: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each named summary; ratios are against the first."""
    first = summaries[0][1]
    return [
        {
            "run": name,
            "backend": summary["backend"],
            "emulator": summary["emulator"],
            "strategy": summary["strategy"],
            "decisions": summary["decisions"],
            "step_s": summary["step_s"],
            "step_ratio": summary["step_s"] / first["step_s"],
            "samples_per_s": summary["samples_per_s"],
            "throughput_ratio": summary["samples_per_s"] / first["samples_per_s"],
            "bubble_ratio": summary["bubble_ratio"],
            "wan_bytes": summary["wan_bytes"],
        }
        for name, summary in summaries
    ]


def _table(rows: list[dict[str, Any]]) -> str:
    width = max(len(row["run"]) for row in rows)
    lines = [
        f"{'run':<{width}}  {'backend':<9}  {'links':<6}  {'strategy':<10}  {'step s':>8}  {'ratio':>6}  "
        f"{'samples/s':>9}  {'ratio':>6}  {'bubble':>7}  {'WAN MB':>8}  decisions"
    ]
    lines += [
        f"{row['run']:<{width}}  {row['backend']:<9}  {row['emulator'] or '-':<6}  {row['strategy']:<10}  "
        f"{row['step_s']:>8.4f}  {row['step_ratio']:>6.3f}  {row['samples_per_s']:>9.2f}  "
        f"{row['throughput_ratio']:>6.3f}  "
        f"{100 * row['bubble_ratio']:>5.1f} %  {row['wan_bytes'] / 1e6:>8.1f}  {row['decisions']}"
        for row in rows
    ]
    return "\n".join(lines)
