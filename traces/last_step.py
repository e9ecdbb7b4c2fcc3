"""How long the last row lasts, in formats whose rows only say when each one starts.

The rule: as long as the median step between the rows; a single row lasts a second.
"""

import numpy as np

from traces.common.errors import InputError
from traces.trace import FloatArray

SINGLE_ROW_S = 1.0


def duration_by_rule_s(times_s: FloatArray) -> float:
    """Return when the last of the rows that start at ``times_s`` ends, in seconds."""
    return float(times_s[-1]) + _median_step_s(times_s)


def starts_lasting(times_s: FloatArray, duration_s: float) -> FloatArray:
    """Return starts from which the rule makes ``duration_s``, to its last digit but for rounding.

    They are ``times_s``, followed by further starts inside the last piece where the rule alone is wrong: one
    where that piece is longer than the median step, else as many as make a shorter step the median.

    Args:
        times_s: Starts of the pieces, seconds, shape (n,).
        duration_s: End of the last piece, seconds.

    Returns:
        Seconds, shape (n or more,).

    Raises:
        InputError: The last piece is too short to hold so many.
    """
    if _lasts(times_s, duration_s):
        return times_s
    one_more = np.append(times_s, duration_s - _median_step_s(times_s))
    if one_more[-1] > times_s[-1] and _lasts(one_more, duration_s):
        return one_more
    return _split_last(times_s, duration_s)


def _split_last(times_s: FloatArray, duration_s: float) -> FloatArray:
    # More equal steps than there are others are the median, whatever the others are. As multiples of the
    # duration's last digit, they add up to it exactly.
    num_steps = len(times_s) + 3
    digit_s = np.spacing(duration_s)
    step_s = digit_s * np.floor((duration_s - times_s[-1]) / num_steps / digit_s)
    if step_s == 0:
        raise InputError(
            f"the last piece of the trace lasts {duration_s - times_s[-1]:g} s, too short to split",
            valid="resample the trace to equal steps, or write csv",
        )
    return np.append(times_s, duration_s - step_s * np.arange(num_steps - 1, 0, -1))


def _median_step_s(times_s: FloatArray) -> float:
    return float(np.median(np.diff(times_s))) if len(times_s) > 1 else SINGLE_ROW_S


def _lasts(times_s: FloatArray, duration_s: float) -> bool:
    return bool(abs(duration_by_rule_s(times_s) - duration_s) <= 4 * np.spacing(duration_s))
