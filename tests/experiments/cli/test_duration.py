"""How far `simulate` goes: so many steps, or so much time."""

import math

import pytest

from experiments.runs.carry_out import DEFAULT_STEPS, bounded
from traces.common.errors import InputError


def test_one_of_steps_and_duration() -> None:
    assert bounded(None, None) == (DEFAULT_STEPS, math.inf)
    assert bounded(7, None) == (7, math.inf)
    steps, duration_s = bounded(None, "60 min")
    assert duration_s == 3600
    assert steps > 10**9


@pytest.mark.parametrize(
    ("steps", "duration", "message"),
    [(3, "5 s", "both --steps and --duration"), (None, "5", "has no unit"), (None, "0 s", "more than 0 s")],
)
def test_what_is_refused(steps: int | None, duration: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bounded(steps, duration)
