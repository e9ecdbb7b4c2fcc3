"""The microbatches of strategies that have no method of their own for choosing them."""

from planner.scenario import Scenario


def even_microbatches(scenario: Scenario, samples: int, stages: int) -> tuple[int, ...]:
    """Return equal microbatches of ``samples`` in all, the last one smaller if they do not divide.

    The scenario's ``microbatch`` if it gives one; else as many as four for each stage, as far as the samples go,
    which keeps 1F1B's bubble below a fifth.
    """
    size = scenario.training.microbatch or max(1, samples // (4 * stages))
    whole, rest = divmod(samples, size)
    return (size,) * whole + ((rest,) if rest else ())
