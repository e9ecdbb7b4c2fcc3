"""Schedules by name: functions from a scheduling problem to the order of actions of each of its workers.

Actions are written F (forward), B (unsplit backward), I (input gradient) and W (weight gradient); I and W are the two
halves of a split backward. ``2F0`` is the forward of microbatch 0 in stage 2. In formulas, P is the number of workers,
M the number of microbatches of a step, and s the index of a stage.
"""

from collections.abc import Callable, Mapping

from planner.schedules.compact_zb import compact_zb, portfolio
from planner.schedules.kernel.problem import Orders, SchedulingProblem
from planner.schedules.one_f_one_b import gpipe, interleaved_one_f_one_b, one_f_one_b
from planner.schedules.optimal import optimal
from planner.schedules.zero_bubble import zb_h1, zb_h2, zb_v

Schedule = Callable[[SchedulingProblem], Orders]

# Schedules whose stages hold the activations of all microbatches at once, whatever their ``in_flight``.
HOLD_ALL = frozenset({"gpipe"})

# Schedules that never split a backward (B) into I and W.
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
