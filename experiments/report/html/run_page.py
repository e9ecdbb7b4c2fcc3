"""Writes the page of one or several runs: one HTML file that loads nothing else."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bokeh.models import Model, Range1d

from experiments.report.data.bars import BAR_KINDS
from experiments.report.data.gantt_rows import choose_steps, common_steps
from experiments.report.data.labels import batch_text, time_text
from experiments.report.data.run_view import RunView, run_views
from experiments.report.html.document import BUBBLE, document
from experiments.report.html.gantt import known_json, pipeline_gantt, pipeline_overview
from experiments.report.html.links import link_panels, mean_over_s
from experiments.report.html.memory import memory_panels
from experiments.report.html.steps import loss_panel, step_axis, step_panel
from experiments.report.html.tables import (
    DECISION_HEADS,
    RUN_HEADS,
    decision_rows,
    device_heads,
    device_rows,
    run_rows,
    verdict,
    without_empty_columns,
)
from planner.events.log import as_log
from planner.runs.record import RunRecord
from traces.common.atomic import write_text_atomically

# Largest width of a label's character, and the least and the most room for labels, pixels.
_CHARACTER_PIXELS = 6.6
_LEFT_PIXELS = (90, 300)
_PLAIN_LEFT_PIXELS = 62


def write_run_page(records: Sequence[RunRecord], names: Sequence[str], path: Path) -> None:
    """Write runs of one or several scenarios as one HTML file; the runs' names must differ."""
    assert records, "there must be a run to show"
    # With events in columns, the panels need not convert them again.
    runs = run_views([replace(record, events=as_log(record.events)) for record in records], names)
    write_text_atomically(path, run_page(runs))


def run_page(runs: tuple[RunView, ...]) -> str:
    """Return the page of some runs as HTML."""
    figures = _figures(runs)
    decisions = decision_rows(runs)
    return document(
        "runs.html",
        "runs.js",
        known_json(runs),
        figures,
        title=" and ".join(dict.fromkeys(run.record.scenario.name for run in runs)),
        facts=_facts(runs),
        verdict=verdict(runs),
        run_table=without_empty_columns(RUN_HEADS, run_rows(runs)),
        legend=_legend(runs),
        bubble=BUBBLE,
        pipelines=[_pipeline(run) for run in runs],
        links=[name for name in figures if name.startswith("link-")],
        mean_over=time_text(mean_over_s(runs)),
        memory=[name for name in figures if name.startswith("memory-")],
        decides=bool(decisions),
        decision_table=without_empty_columns(DECISION_HEADS, decisions),
        device_table=without_empty_columns(device_heads(runs), device_rows(runs)),
    )


def _figures(runs: tuple[RunView, ...]) -> dict[str, Model]:
    labels = [label for run in runs for label in run.devices.values()]
    left = round(min(max(_CHARACTER_PIXELS * max(map(len, labels)) + 16, _LEFT_PIXELS[0]), _LEFT_PIXELS[1]))
    windows = _windows(runs)
    figures: dict[str, Model] = {}
    for run, window in zip(runs, windows, strict=True):
        figures[f"overview-{run.index}"] = pipeline_overview(run, window, left)
        figures[f"gantt-{run.index}"] = pipeline_gantt(run, window, left)
    steps = step_axis(runs)
    figures["steps"] = step_panel(runs, steps, _PLAIN_LEFT_PIXELS)
    loss = loss_panel(runs, steps, _PLAIN_LEFT_PIXELS)
    if loss is not None:
        figures["loss"] = loss
    for panel in (*link_panels(runs, windows[0], _PLAIN_LEFT_PIXELS), *memory_panels(runs, _PLAIN_LEFT_PIXELS)):
        figures[str(panel.name)] = panel
    return figures


def _windows(runs: Sequence[RunView]) -> list[Range1d]:
    """Choose the part of each run to show first: a few steps, around the first change of plan if there is one."""
    longest_s = max(run.end_s for run in runs)
    spans_s = []
    for run in runs:
        # Runs without a common step, such as a run and its continuation from a checkpoint, each show their own steps.
        first, end = choose_steps(runs if common_steps(runs) else [run])
        starts_s = (*run.starts_s, run.end_s)
        spans_s.append((starts_s[first - run.first_step], starts_s[end - run.first_step]))
    width_s = 1.04 * max(end_s - start_s for start_s, end_s in spans_s)
    return [
        Range1d(
            start_s - 0.02 * width_s,
            start_s + 0.98 * width_s,
            name=f"window-{run.index}",
            bounds=(-0.05 * longest_s, 1.05 * longest_s),
        )
        for run, (start_s, _) in zip(runs, spans_s, strict=True)
    ]


def _facts(runs: Sequence[RunView]) -> list[str]:
    plan, scenario = runs[0].record.plan, runs[0].record.scenario
    regions = len({scenario.cluster.by_name[device].region for device in plan.devices})
    return [
        f"model {scenario.model.name}",
        f"{_counted(len(plan.devices), 'device')} in {_counted(regions, 'region')}",
        batch_text(runs[0].record),
        "strategy " + ", ".join(dict.fromkeys(run.record.plan.strategy for run in runs)),
        "schedule " + ", ".join(dict.fromkeys(run.record.plan.schedule for run in runs)),
    ]


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count > 1 else ''}"


def _legend(runs: Sequence[RunView]) -> list[Any]:
    shown = {int(kind) for run in runs for kind in set(run.bars.kind.tolist())}
    return [kind for number, kind in enumerate(BAR_KINDS) if number in shown]


def _pipeline(run: RunView) -> dict[str, Any]:
    metrics = run.metrics
    return {
        "name": run.name,
        "colour": run.colour,
        "heading": f"{run.name}: {metrics.samples_per_s:,.4g} samples/s, "
        f"devices idle {metrics.bubble_ratio:.0%} of the run",
    }
