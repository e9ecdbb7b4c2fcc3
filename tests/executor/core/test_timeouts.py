"""Tests for the timeouts that an environment variable changes."""

import pytest

from executor.core.timeouts import Timeouts, timeouts
from traces.common.errors import InputError


def test_the_variable_changes_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEBRIDGE_TIMEOUTS", '{"stopped_s": 1.5}')
    assert timeouts() == Timeouts(stopped_s=1.5)
    monkeypatch.delenv("ROPEBRIDGE_TIMEOUTS")
    assert timeouts() == Timeouts()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"stoped_s": 1}', "did you mean 'stopped_s'"),
        ('{"stopped_s": "1"}', 'stopped_s: "1" is not a number'),
        ('{"stopped_s": 1e999}', "stopped_s: inf is out of range"),
        ('{"stopped_s": -1}', "stopped_s: -1 is out of range"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, text: str, problem: str) -> None:
    monkeypatch.setenv("ROPEBRIDGE_TIMEOUTS", text)
    with pytest.raises(InputError, match=f"environment variable ROPEBRIDGE_TIMEOUTS.*{problem}"):
        timeouts()
