"""Where a pipeline's stages lie: one a worker, round the workers again and again, or down them and back up."""

from planner.schedules.kernel.problem import SchedulingProblem
from traces.common.errors import InputError


def is_straight(workers: tuple[int, ...]) -> bool:
    """Whether every worker holds one stage."""
    return len(set(workers)) == len(workers)


def is_looped(workers: tuple[int, ...]) -> bool:
    """Whether stages go round the workers in turn, so that worker 0 of P holds stages 0, P, 2P, ..."""
    count = len(set(workers))
    return len(workers) % count == 0 and all(holder == workers[stage % count] for stage, holder in enumerate(workers))


def is_v_shaped(workers: tuple[int, ...]) -> bool:
    """Whether the worker of stage s holds stage 2P - 1 - s too, of 2P stages on P workers."""
    return len(workers) == 2 * len(set(workers)) and workers == workers[::-1]


def require_straight(problem: SchedulingProblem, name: str) -> None:
    """Refuse a pipeline whose workers hold several stages.

    Raises:
        InputError: A worker does, so schedule ``name`` says nothing about its order.
    """
    if not is_straight(problem.workers):
        raise InputError(
            f"{problem.stages} stages on {problem.worker_count} workers",
            where=f"schedule '{name}'",
            valid="it orders one stage a worker; take interleaved-1f1b, zb-v, compact-zb or portfolio",
        )
