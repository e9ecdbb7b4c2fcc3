"""ZB-H1, ZB-H2 and ZB-V: zero-bubble schedules (Qi et al., 2023) [paper].

Backwards are split into I (input gradient) and W (weight gradient), so that W can fill idle time; F is forward.
"""

from collections import Counter

from planner.plan.actions import Action, Kind
from planner.schedules.dynamic import dynamic_orders
from planner.schedules.kernel.problem import Orders, SchedulingProblem, is_v_shaped, is_within_limits, require_straight
from planner.schedules.steady_state import steady_state_orders
from traces.common.errors import InputError


def zb_h1(problem: SchedulingProblem) -> Orders:
    """Return the orders of ZB-H1, which stays within the memory of 1F1B.

    With P = 3 stages and M = 4 microbatches::

        stage 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Stage s runs P - s forwards before its first I, and each W follows s microbatches after its I. So every stage holds
    at most P microbatches between the start of F and the end of W. For M >= P microbatches on equal stages without
    transfer time, the makespan is M(F + I + W) + (P - 1)(F + I - min(F, I, W)), which has a third of the bubble of 1F1B
    where F = I = W. A stage runs fewer forwards ahead where ``in_flight`` or memory does not allow more.

    Raises:
        InputError: A worker holds several stages, or a microbatch does not fit into its memory.
    """
    require_straight(problem, "zb-h1")
    depths = [min(problem.stages - stage, limit) for stage, limit in enumerate(problem.in_flight)]
    return steady_state_orders(problem, depths, range(problem.stages))


def zb_h2(problem: SchedulingProblem) -> Orders:
    """Return the orders of ZB-H2, which has no bubble and needs about twice the memory of 1F1B.

    With P = 3 stages and M = 6 microbatches::

        stage 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .. ..
        stage 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 ..
        stage 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    Stage s runs 2P - 2s - 1 forwards before its first I, and each W follows 2s microbatches after its I. So every stage
    holds at most 2P - 1 microbatches between the start of F and the end of W. With F = I = W, no transfer time and
    M >= 2P - 1, no stage idles between its first and its last action: the makespan is (P - 1)F + M(F + I + W). A stage
    runs fewer forwards ahead where ``in_flight`` or memory does not allow more.

    Raises:
        InputError: A worker holds several stages, or a microbatch does not fit into its memory.
    """
    require_straight(problem, "zb-h2")
    stages = range(problem.stages)
    depths = [min(2 * (problem.stages - stage) - 1, problem.in_flight[stage]) for stage in stages]
    return steady_state_orders(problem, depths, [2 * stage for stage in stages])


def zb_v(problem: SchedulingProblem) -> Orders:
    """Return the orders of ZB-V, which has no bubble, the memory of 1F1B, and twice the traffic of 1F1B.

    The 2P stages lie in a V: worker w of P holds stages w (down) and 2P - 1 - w (up), so that the first and the last
    stage are both on worker 0. With P = 2 workers and M = 4 microbatches::

        worker 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 ...
        worker 1  ... 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    F, I and W are times of one stage, which is half as large as with P stages. With F = I = W, no transfer time and
    M >= 2P - 1, no worker idles between its first and its last action: the makespan is (P - 1)F + 2M(F + I + W), and a
    worker holds at most 2P activations, counted over both stages. Each microbatch crosses every link twice as often as
    with 1F1B. Where these orders exceed ``in_flight`` or memory, the orders of
    `planner.schedules.dynamic.dynamic_orders`, which respect both, are returned instead.

    Raises:
        InputError: Stages s and 2P - 1 - s are on different workers, or a microbatch does not fit into memory.
    """
    if not is_v_shaped(problem.workers):
        raise InputError(
            f"stages lie on workers {', '.join(map(str, problem.workers))}",
            where="schedule 'zb-v'",
            valid="place stages down the workers and back up: 0, 1, 1, 0 for two workers",
        )
    rows = {worker: _v_shaped(problem, place) for place, worker in enumerate(problem.workers[: problem.worker_count])}
    orders = Orders.from_actions(rows[worker] for worker in range(problem.worker_count))
    return orders if is_within_limits(problem, orders) else dynamic_orders(problem, split=True)


def _v_shaped(problem: SchedulingProblem, place: int) -> list[Action]:
    """Return the actions of the worker that holds stages ``place`` and 2P - 1 - ``place``."""
    down, up, ahead = place, problem.stages - 1 - place, problem.worker_count - place
    microbatches = max(problem.microbatches, 2 * problem.worker_count - 1)
    row: list[Action] = []
    done: Counter[tuple[int, str]] = Counter()

    def add(stage: int, kinds: str) -> None:
        """Append one action per letter of ``kinds``, for the next microbatch of that kind, while there is one."""
        for kind in kinds:
            if done[stage, kind] < microbatches:
                row.append(Action(stage, Kind(kind), done[stage, kind]))
                done[stage, kind] += 1

    add(down, "F" * (2 * ahead - 1))
    for _ in range(place):
        add(up, "F")
        add(down, "F")
    for _ in range(ahead):
        add(up, "FIW")
    while done[up, "F"] < microbatches:
        add(down, "FIW")
        add(up, "FIW")
    for _ in range(place):
        add(down, "I")
        add(up, "I")
    for _ in range(ahead):
        add(down, "IW")
    add(up, "W" * microbatches)
    add(down, "W" * microbatches)
    return [action for action in row if action.microbatch < problem.microbatches]
