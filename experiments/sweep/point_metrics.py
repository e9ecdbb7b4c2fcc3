"""What a table says of a point's run: the metrics of all backends, memory, and what the plan looked like."""

import math
from collections.abc import Mapping
from statistics import fmean

from planner.runs.memory_timeline import peak_memory_bytes
from planner.runs.metrics import measure
from planner.runs.record import RunRecord

Value = float | int | str

# Metrics of a whole run, in the order of the table's columns; those of single devices follow.
RUN_METRICS = (
    "step_s",
    "samples_per_s",
    "bubble_ratio",
    "utilisation",
    "wan_bytes",
    "cost_usd",
    "staleness",
    "peak_memory_bytes",
    "steps_done",
    "decisions",
    "plan_devices",
    "plan_pipelines",
    "plan_stages",
    "plan_microbatches",
)

# Of single devices: ``utilisation[NAME]``.
DEVICE_METRICS = ("utilisation", "peak_memory_bytes")


def point_metrics(record: RunRecord) -> dict[str, Value]:
    """Return the metrics of a run as a table has them: a number each.

    ``utilisation`` is the mean over the devices, ``peak_memory_bytes`` that of the fullest one, and what begins with
    ``plan_`` is of the first plan: its devices, pipelines, the stages of its longest pipeline, and all microbatches
    of a step.
    """
    metrics, memory_bytes = measure(record), peak_memory_bytes(record)
    pipelines = record.plan.pipelines
    values: dict[str, Value] = {
        "step_s": metrics.step_s,
        "samples_per_s": metrics.samples_per_s,
        "bubble_ratio": metrics.bubble_ratio,
        "utilisation": fmean(metrics.utilisation.values()),
        "wan_bytes": metrics.wan_bytes,
        "cost_usd": metrics.cost_usd,
        "staleness": metrics.staleness,
        "peak_memory_bytes": max(memory_bytes.values()),
        "steps_done": metrics.steps,
        "decisions": len(record.decisions),
        "plan_devices": len(record.plan.devices),
        "plan_pipelines": len(pipelines),
        "plan_stages": max(len(pipeline.stages) for pipeline in pipelines),
        "plan_microbatches": sum(len(pipeline.microbatches) for pipeline in pipelines),
    }
    of_devices = (metrics.utilisation, memory_bytes)
    for name, by_device in zip(DEVICE_METRICS, of_devices, strict=True):
        values |= _by_device(name, by_device)
    return {name: value for name, value in values.items() if not isinstance(value, float) or math.isfinite(value)}


def _by_device(name: str, values: Mapping[str, float]) -> dict[str, Value]:
    return {f"{name}[{device}]": value for device, value in values.items()}
