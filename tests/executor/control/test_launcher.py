"""What a launcher says of processes that ended before they could write down why."""

from pathlib import Path

import pytest

from executor.backend import prepared_job, run_job
from executor.core.job import Emulator, RunConfig
from executor.wan.testbed import missing
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.common.errors import RunError

MODULE = """
from executor.rank.worker import join_job
def main(agent, folder):
    join_job(agent, folder)
    raise ValueError("what went wrong")
"""


@pytest.mark.parametrize("emulator", ["none", "relay"])
def test_the_cause_and_its_stack_are_told(emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lack = missing() if emulator == "relay" else None
    if lack is not None:
        pytest.skip(lack)
    (tmp_path / "ends_at_once.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    scenario = chain_scenario([1e-3] * 2, [1e-3] * 2)
    plan = chain_plan(scenario)
    with (
        prepared_job(scenario, plan, RunConfig("paced", 1, emulator, adapts=False)) as job,
        pytest.raises(RunError, match=r"status 1: .*\| ValueError: what went wrong\n") as raised,
    ):
        run_job(job, plan.devices, module="ends_at_once")
    (note,) = raised.value.__notes__
    assert note.startswith("Traceback")
    assert note.endswith("ValueError: what went wrong")
