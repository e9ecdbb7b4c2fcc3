"""Schedules by name: functions from a problem to the orders of its workers, each with its picture and formula."""

from collections.abc import Callable, Mapping

from planner.schedules.compact_zb import compact_zb, portfolio
from planner.schedules.kernel.problem import Orders, SchedulingProblem
from planner.schedules.one_f_one_b import gpipe, interleaved_one_f_one_b, one_f_one_b
from planner.schedules.optimal import optimal
from planner.schedules.zero_bubble import zb_h1, zb_h2, zb_v

Schedule = Callable[[SchedulingProblem], Orders]

# Schedules that hold every microbatch at once, whatever the depth of a stage.
HOLD_ALL = frozenset({"gpipe"})

# Schedules whose backwards are never split into I and W.
WHOLE = frozenset({"gpipe", "1f1b", "interleaved-1f1b"})

SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved_one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "compact-zb": compact_zb,
    "portfolio": portfolio,
    "optimal": optimal,
}
