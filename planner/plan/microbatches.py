"""Samples cut into microbatches, by strategies that have no method of their own for it."""

from planner.scenario.scenario import Scenario


def even_microbatches(scenario: Scenario, samples: int, stages: int) -> tuple[int, ...]:
    """Return equal microbatches of ``samples`` in all, the last one smaller if they do not divide.

    The scenario's ``microbatch`` if it gives one; else as many as four for each stage, as far as the samples go,
    which keeps 1F1B's bubble below a fifth.
    """
    size = scenario.training.microbatch or max(1, samples // (4 * stages))
    whole, rest = divmod(samples, size)
    return (size,) * whole + ((rest,) if rest else ())


def even_cut(samples: int, count: int) -> tuple[int, ...]:
    """Return ``samples`` in ``count`` microbatches whose sizes differ by one at most, the largest first."""
    whole, rest = divmod(samples, count)
    return tuple(whole + (index < rest) for index in range(count))
