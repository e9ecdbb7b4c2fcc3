"""The results of a run: its record, metrics, memory over time and gradient noise."""

from typing import TYPE_CHECKING

from traces.common.faces import lazy_face

if TYPE_CHECKING:
    from planner.runs.memory_timeline import memory_timelines as memory_timelines
    from planner.runs.metrics import Metrics as Metrics
    from planner.runs.metrics import measure as measure
    from planner.runs.record import Backend as Backend
    from planner.runs.record import Progress as Progress
    from planner.runs.record import RunRecord as RunRecord
else:
    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "planner.runs.record": ("Backend", "RunRecord", "Progress"),
            "planner.runs.metrics": ("Metrics", "measure"),
            "planner.runs.memory_timeline": ("memory_timelines",),
        },
    )
