"""The orders in which a stage works, by name: one file each, with its picture and formula."""

from collections.abc import Callable, Mapping

from planner.actions import Action
from planner.plan import Pipeline
from planner.schedules.gpipe import gpipe
from planner.schedules.one_f_one_b import one_f_one_b

Schedule = Callable[[Pipeline, int], tuple[Action, ...]]

# Schedules that hold every microbatch at once, whatever depth a stage has.
HOLD_ALL = frozenset({"gpipe"})

SCHEDULES: Mapping[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b}
