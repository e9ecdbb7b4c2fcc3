"""Tests for the tables of options' costs, on random clusters of several classes and regions."""

from math import inf

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.device_classes import device_classes_of, stage_options
from planner.systems.auto.candidates.option_costs import lower_bounds_s, option_costs, with_class_order
from planner.systems.auto.candidates.partition_dp import best_partition
from tests.helpers.scenarios.pool_scenarios import pool_scenarios


@settings(max_examples=40)
@given(pool_scenarios(), st.integers(1, 4), st.floats(0.2, 4.0))
def test_leaving_out_links_that_are_too_slow_changes_no_result(
    scenario: Scenario, microbatch: int, factor: float
) -> None:
    """A step within a limit sends no microbatch for longer than the limit, so that such links need no times."""
    classes, count = device_classes_of(scenario.cluster), 8
    options = stage_options(classes, scenario, 1, microbatch, recompute=False)
    least_s, alone_s = lower_bounds_s(options, scenario, 1, microbatch)
    limit_s = factor * ((count - 1) * least_s + alone_s)
    places = {each: place for place, each in enumerate(classes)}
    found = []
    for most_busy_s in (inf, limit_s / count):
        costs = option_costs(options, scenario, 1, microbatch, 1.0, most_busy_s)
        ordered = with_class_order(costs, options, places)
        found.append(best_partition(ordered, count, 4, least_s, limit_s, inf))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
