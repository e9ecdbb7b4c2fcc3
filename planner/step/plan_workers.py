"""The pipelines of a plan as workers with orders: what a graph is built from."""

from collections.abc import Iterable, Sequence

import numpy as np

from planner.plan.plan import Pipeline, Plan, Stage
from planner.schedules.kernel.orders import Orders
from planner.step.graph import Ints
from planner.step.graph_building import Workers


def plan_workers(plan: Plan, orders: Sequence[Orders]) -> Workers:
    """Return the workers of all pipelines, counted through.

    Args:
        plan: A checked plan.
        orders: Of each pipeline.
    """
    held = [(pipeline, stage) for pipeline in plan.pipelines for stage in pipeline.stages]
    first_stage = starts(len(pipeline.stages) for pipeline in plan.pipelines)
    first_worker = starts(max(pipeline.workers) + 1 for pipeline in plan.pipelines)
    stage_worker = np.concatenate(
        [np.array(each.workers) + first for each, first in zip(plan.pipelines, first_worker, strict=False)]
    )
    _, first_held = np.unique(stage_worker, return_index=True)
    is_last = np.zeros(len(held), np.bool_)
    is_last[first_stage[1:] - 1] = True
    bounds = [_bounds(pipeline, stage) for pipeline, stage in held]
    return Workers(
        starts(int(count) for each in orders for count in np.diff(each.first_action)),
        np.concatenate([each.kind for each in orders]),
        np.concatenate([each.stage + first for each, first in zip(orders, first_stage, strict=False)]),
        np.concatenate([each.microbatch for each in orders]).astype(np.int64),
        starts(len(held[index][1].replicas) for index in first_held),
        stage_worker,
        is_last,
        starts(len(each) for each in bounds)[:-1],
        np.concatenate(bounds),
        starts(3 * len(pipeline.microbatches) * len(stage.replicas) for pipeline, stage in held),
    )


def starts(counts: Iterable[int]) -> Ints:
    """Return where each of consecutive parts begins, and after the last one the sum of the counts."""
    return np.cumsum([0, *counts], dtype=np.int64)


def _bounds(pipeline: Pipeline, stage: Stage) -> Ints:
    """For each microbatch, where each replica's samples begin, and their number; flat."""
    sizes, which = np.unique(np.array(pipeline.microbatches), return_inverse=True)
    rows = [[0, *(end for _, end in stage.intervals(int(size)))] for size in sizes]
    return np.array(rows, np.int64)[which].ravel()
