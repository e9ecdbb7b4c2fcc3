"""When what a stage sends arrives: the channel carries one transfer at a time, first come, first served."""

from planner.schedules.compiled import inner
from planner.schedules.problem import Floats
from planner.schedules.tables import Tables


@inner
def arrive_s(
    tables: Tables, direction: int, stage: int, microbatch: int, handed_over_s: float, free_s: Floats
) -> float:
    """Return when a transfer arrives, seconds; its channel is busy from then on as ``free_s`` says.

    Args:
        tables: The problem.
        direction: `planner.schedules.tables.DOWN` or `UP`.
        stage: That sends.
        microbatch: That it belongs to.
        handed_over_s: When the action that made it ended, seconds.
        free_s: When each channel has carried what it was given, seconds, [channels]; is updated.
    """
    channel = tables.channel[direction, stage]
    if channel < 0:
        return handed_over_s
    begin_s = max(handed_over_s, free_s[channel])
    free_s[channel] = begin_s + tables.occupancy_s[direction, stage, microbatch]
    return float(free_s[channel] + tables.latency_s[direction, stage])
