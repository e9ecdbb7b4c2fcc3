"""The tables of a page of runs, as rows for its template; loads no Bokeh."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.report.data.decisions import reasons
from experiments.report.data.labels import cost_text, memory_text, size_text, time_text
from experiments.report.data.run_view import RunView
from planner.runs.metrics import trained_samples


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    Attributes:
        cells: Texts in the order of the table's columns.
        colour: Colour of the mark in the first cell; empty for no mark.
        run: Index of the run that a click on the row shows.
        step: Index of the step that a click shows, counted from the run's first step; None if a click does nothing.
    """

    cells: tuple[str, ...]
    colour: str = ""
    run: int = 0
    step: int | None = None


def without_empty_columns(heads: Sequence[str], rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """Return heads and rows of a table without the columns that are empty in every row."""
    kept = [place for place in range(len(heads)) if any(row.cells[place] for row in rows)]
    return [heads[place] for place in kept], [
        replace(row, cells=tuple(row.cells[place] for place in kept)) for row in rows
    ]


RUN_HEADS = (
    "run",
    "what",
    "steps",
    "step time",
    "ratio",
    "samples/s",
    "idle",
    "between regions",
    "cost",
    "per million samples",
    "fullest device",
    "decisions",
    "loss",
)


def run_rows(runs: Sequence[RunView]) -> list[Row]:
    """Return a row with the main metrics of each run."""
    return [Row(_run_cells(run, runs[0]), run.colour, run.index) for run in runs]


def _run_cells(run: RunView, first: RunView) -> tuple[str, ...]:
    record, metrics = run.record, run.metrics
    emulator = f", links: {record.network.emulator}" if record.network is not None else ""
    device = f", on {record.computed_on} instead of the plan's devices" if record.computed_on else ""
    samples = trained_samples(record)
    peaks = run.peak_bytes
    fullest = max(peaks, key=lambda name: peaks[name])
    losses = record.losses
    return (
        run.name,
        f"{record.backend}{emulator}{device}, {record.plan.strategy}, {record.plan.schedule}",
        str(metrics.steps),
        time_text(metrics.step_s),
        "1" if run is first else f"{metrics.step_s / first.metrics.step_s:.3f}",
        f"{metrics.samples_per_s:,.4g}",
        f"{metrics.bubble_ratio:.1%}",
        size_text(metrics.wan_bytes),
        cost_text(metrics.cost_usd) if metrics.cost_usd else "",
        cost_text(metrics.cost_usd / samples * 1e6) if metrics.cost_usd else "",
        f"{fullest}: {memory_text(peaks[fullest])}",
        str(len(record.decisions) or ""),
        f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else "",
    )


DECISION_HEADS = ("run", "", "seen in step", "from step", "what it changed", "what had been seen", "moved", "step time")


def decision_rows(runs: Sequence[RunView]) -> list[Row]:
    """Return a row for each decision, run by run."""
    return [row for run in runs for row in _decisions_of(run)]


def _decisions_of(run: RunView) -> list[Row]:
    decisions = run.record.decisions
    if not decisions:
        return []
    ends = [*(decision.first_step for decision in decisions[1:]), run.first_step + len(run.ends_s)]
    rows = []
    before_s = _median_s(run, run.first_step, decisions[0].first_step)
    for number, (decision, reason, end) in enumerate(zip(decisions, reasons(run.record), ends, strict=True), start=1):
        after_s = _median_s(run, decision.first_step, end)
        moved_bytes = decision.migration.size_bytes
        cells = (
            run.name,
            str(number),
            str(decision.observed_step),
            str(decision.first_step),
            decision.change.replace("->", "→"),
            reason,
            size_text(moved_bytes) if moved_bytes else "",
            f"{time_text(before_s) if before_s else '…'} → {time_text(after_s) if after_s else '…'}",
        )
        rows.append(Row(cells, run.colour, run.index, decision.first_step - run.first_step))
        before_s = after_s or before_s
    return rows


def _median_s(run: RunView, first: int, end: int) -> float | None:
    times_s = run.step_times_s[max(first - run.first_step, 0) : max(end - run.first_step, 0)]
    return float(np.median(times_s)) if times_s else None


def device_heads(runs: Sequence[RunView]) -> tuple[str, ...]:
    """Return the column heads of `device_rows`: the device's properties, then two columns for each run."""
    each = tuple(f"{what}, {run.name}" for run in runs for what in ("busy", "most memory"))
    return ("device", "kind", "region", "memory", "USD/h", *each)


def device_rows(runs: Sequence[RunView]) -> list[Row]:
    """Return a row for each device of any run, in the order of the Gantt charts."""
    peaks = [run.peak_bytes for run in runs]
    rows = []
    for name in dict.fromkeys(device for run in runs for device in run.devices):
        owner = next(run for run in runs if name in run.devices)
        device = owner.record.scenario.cluster.by_name[name]
        cells = [owner.devices[name], device.kind, device.region, memory_text(device.memory_bytes)]
        cells.append(f"{device.price_per_hour:g}" if device.price_per_hour else "")
        for run, peak in zip(runs, peaks, strict=True):
            busy = run.metrics.utilisation.get(name)
            cells.append(f"{busy:.1%}" if busy is not None else "")
            cells.append(memory_text(peak[name]) if name in peak else "")
        rows.append(Row(tuple(cells)))
    return rows


def verdict(runs: Sequence[RunView]) -> str:
    """Return a sentence on the simulation's error; empty unless the runs are one simulated and one real run."""
    simulated = [run for run in runs if run.record.backend == "simulated"]
    carried_out = [run for run in runs if run.record.backend != "simulated"]
    if len(simulated) != 1 or len(carried_out) != 1:
        return ""
    model, real = simulated[0], carried_out[0]
    if model.record.scenario.name != real.record.scenario.name:
        return ""
    apart = model.metrics.step_s / real.metrics.step_s - 1
    amount = "as long as" if abs(apart) < 0.0005 else f"{abs(apart):.1%} {'shorter' if apart < 0 else 'longer'} than"
    steps = min(len(model.ends_s), len(real.ends_s))
    same = model.metrics.wan_bytes == real.metrics.wan_bytes
    sent = (
        f"both sent {size_text(real.metrics.wan_bytes)} between regions"
        if same
        else f"{size_text(model.metrics.wan_bytes)} and {size_text(real.metrics.wan_bytes)} between regions"
    )
    return f"Over {steps} steps the simulated step is {amount} the one that was carried out; {sent}."
