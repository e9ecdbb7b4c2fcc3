"""When what a stage sends arrives: the channel carries one transfer at a time, first come, first served."""

from planner.schedules.kernel.compiled import inner
from planner.schedules.kernel.problem import Floats
from planner.schedules.kernel.tables import Tables


@inner
def arrive_s(
    tables: Tables, direction: int, stage: int, microbatch: int, handed_over_s: float, carried_s: Floats
) -> float:
    """Return when a transfer arrives, seconds; nothing overtakes those before it on its channel.

    Args:
        tables: The problem.
        direction: `planner.schedules.kernel.tables.DOWN` or `UP`.
        stage: That sends.
        microbatch: That it belongs to.
        handed_over_s: When the action that made it ended, seconds.
        carried_s: When what each channel was given has left, and has arrived, seconds, [2, channels]; is updated.
    """
    channel = tables.channel[direction, stage]
    if channel < 0:
        return handed_over_s
    left_s = max(handed_over_s, carried_s[0, channel]) + tables.transmission_s[direction, stage, microbatch]
    carried_s[0, channel] = left_s
    carried_s[1, channel] = max(carried_s[1, channel], left_s + tables.latency_s[direction, stage])
    return float(carried_s[1, channel])
