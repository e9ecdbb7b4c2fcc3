"""What a launcher says of processes that ended before they could write down why."""

from pathlib import Path

import pytest

from executor.control.launcher import prepared_job, run_job
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


def test_what_cannot_be_loaded_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cannot_be_loaded.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    scenario = chain_scenario([1e-3] * 2, [1e-3] * 2)
    plan = chain_plan(scenario)
    why = "this host cannot load what its ranks run: ZeroDivisionError: division by zero"
    with (
        prepared_job(scenario, plan, RunConfig("paced", 1, "none", adapts=False)) as job,
        pytest.raises(RunError, match=why),
    ):
        run_job(job, plan.devices, module="cannot_be_loaded")


KILLED = """
import os, signal
from pathlib import Path
from executor.core.job import JobFolder
def main(agent, folder):
    # As if it had been killed before it could open its log.
    JobFolder(Path(folder)).of_rank("log", int(os.environ["RANK"])).unlink()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_before_it_has_a_log_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "killed_at_once.py").write_text(KILLED)
    monkeypatch.syspath_prepend(tmp_path)
    scenario = chain_scenario([1e-3] * 2, [1e-3] * 2)
    plan = chain_plan(scenario)
    with (
        prepared_job(scenario, plan, RunConfig("paced", 1, "none", adapts=False)) as job,
        pytest.raises(RunError, match=r"rank \d \(device 'device-\d', host .*SIGKILL"),
    ):
        run_job(job, plan.devices, module="killed_at_once")


PLACES = """
import os
from pathlib import Path
from executor.rank.worker import join_job
def main(agent, folder):
    join_job(agent, folder)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    (Path(folder) / f"place-{os.environ['RANK']}").write_text(" ".join(os.environ[each] for each in names))
    os._exit(0)
"""


def test_ranks_know_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's GPU is that of its number on the host."""
    (tmp_path / "writes_its_place.py").write_text(PLACES)
    monkeypatch.syspath_prepend(tmp_path)
    scenario = chain_scenario([1e-3] * 2, [1e-3] * 2)
    plan = chain_plan(scenario)
    with prepared_job(scenario, plan, RunConfig("paced", 1, "none", adapts=False)) as job:
        run_job(job, plan.devices, module="writes_its_place")
        assert [(job.path / f"place-{rank}").read_text() for rank in range(2)] == ["0 0 2 2", "1 1 2 2"]
