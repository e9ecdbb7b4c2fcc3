"""Equal steps over a duration."""

import math

import numpy as np

from traces.common.errors import InputError
from traces.trace import FloatArray

MAXIMUM_STEPS = 50_000_000


def step_edges_s(duration_s: float, step_s: float) -> FloatArray:
    """Return where equal steps start, and where the last one ends.

    Args:
        duration_s: End of the last step, seconds; that step is shorter where this is no multiple.
        step_s: Length of every other step, seconds.

    Returns:
        Seconds, shape (steps + 1,), from 0 to exactly ``duration_s``.

    Raises:
        InputError: A length is not positive and finite, or there would be more than 50 million steps.
    """
    for name, value_s in (("duration", duration_s), ("step", step_s)):
        if not (math.isfinite(value_s) and value_s > 0):
            raise InputError(f"the {name} is {value_s:g} s", valid=f"a {name} is finite and longer than 0 s")
    steps = duration_s / step_s
    if steps > MAXIMUM_STEPS:
        raise InputError(
            f"{duration_s:g} s in steps of {step_s:g} s are {steps:.3g} steps",
            valid=f"choose a longer step or a shorter duration, at most {MAXIMUM_STEPS:,} steps",
        )
    # 0.3 s / 0.1 s is a hair less than 3, 0.7 s / 0.1 s a hair less than 7: neither adds a step of no length.
    num_steps = max(1, math.ceil(steps - 1e-9))
    return np.append(step_s * np.arange(num_steps), duration_s)
