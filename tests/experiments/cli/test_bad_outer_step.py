"""Settings of the outer step that cannot be, given to the command in a plan file: status 2 and one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes.command import ropebridge


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            {"method": "asgd", "outer": {"momentum": 0.5}},
            ["synchronisation.outer", "does not fit method 'asgd'", "diloco or diloco-streaming"],
        ),
        ({"method": "diloco", "outer": {"momentum": 1.5}}, ["synchronisation.outer.momentum", "0 to below 1"]),
        ({"method": "diloco", "outer": {"momentun": 0.5}}, ["plan.json:", "outer.momentun", "'momentum'"]),
        ({"method": "diloco", "interval_steps": 0}, ["synchronisation.interval_steps", "0 steps", "1 or more"]),
        (
            {"method": "diloco-streaming", "interval_steps": 100, "outer": {"fragments": 50}},
            ["synchronisation.outer.fragments", "50 fragments", "give 1 to"],
        ),
        (
            {"method": "diloco", "outer": {"exchange": "all-gather"}},
            ["synchronisation.outer.exchange", "unknown exchange 'all-gather'", "allgather"],
        ),
        (
            {"method": "diloco", "outer": {"exchange": "reduce-scatter", "density": 0.02}},
            ["synchronisation.outer.exchange", "a density of 0.02", "density of 1"],
        ),
        (
            {"method": "diloco-decoupled"},
            ["synchronisation.outer.syncers", "needs a device that takes the outer steps"],
        ),
        (
            {"method": "diloco-decoupled", "outer": {"syncers": ["north-worker"]}},
            ["synchronisation.outer.syncers[0]", "'north-worker' trains layers"],
        ),
    ],
)
def test_an_outer_step_that_cannot_be(how: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert ropebridge("plan", "digits", "--strategy", "ddp", "-o", path).returncode == 0
    plan = json.loads(path.read_text())
    path.write_text(json.dumps(plan | {"synchronisation": how}))
    done = ropebridge("simulate", "digits", "--plan", path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words), line
