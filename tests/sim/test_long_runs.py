"""A simulation that writes its events as it goes has the same results."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.runs.folder import EVENTS, read_record, summarise, write_record
from planner.events import file as event_file
from planner.events.event import Event, in_order, write_events
from planner.events.file import EventFile, EventSpool
from planner.events.log import FIELDS, TEXTS, EventLog
from planner.runs.memory_timeline import memory_timelines
from planner.scenario.faults import Absence
from sim import recorder
from sim.simulator import Simulator
from tests.helpers.strategies.scripted_policy import Scripted
from tests.planner.events.test_event_log import LISTS
from tests.sim.test_departures_sim import scenario_with, stages_on


@given(st.lists(LISTS.filter(len), min_size=1, max_size=5))
def test_a_spool_sorts_as_one_log(tmp_path_factory: pytest.TempPathFactory, parts: list[list[Event]]) -> None:
    folder = tmp_path_factory.mktemp("events")
    spool = EventSpool(folder / "spooled.parquet")
    numbers: dict[str, int] = {}
    for part in parts:
        log = EventLog.from_events(part)
        number = np.array([numbers.setdefault(name, len(numbers)) for name in log.names])
        spool.append({name: number[log.columns[name]] if name in TEXTS else log.columns[name] for name in FIELDS})
    read = spool.sort(tuple(numbers))
    ordered = in_order(event for part in parts for event in part)
    write_events(ordered, folder / "whole.parquet")
    assert list(read) == ordered
    assert read == ordered == EventFile(folder / "whole.parquet")
    assert (folder / "spooled.parquet").read_bytes() == (folder / "whole.parquet").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["spooled.parquet", "whole.parquet"]


def test_a_run_written_as_it_goes_has_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = scenario_with([Absence("device-1", 26.0, 60.0)])
    plan, rest = stages_on(scenario, [0, 1, 2]), stages_on(scenario, [0, 2])

    def policy() -> Scripted:
        return Scripted({20: plan}, {("device-1",): rest})

    kept = Simulator(backup_every=3).run(scenario, plan, policy(), 40)
    write_record(kept, tmp_path / "kept")
    (tmp_path / "written").mkdir()
    monkeypatch.setattr(recorder, "PART_ROWS", 40)
    monkeypatch.setattr(event_file, "PART_ROWS", 40)
    written = Simulator(backup_every=3, file=tmp_path / "written" / EVENTS).run(scenario, plan, policy(), 40)
    write_record(written, tmp_path / "written")
    assert isinstance(written.events, EventFile)
    assert len(list(written.events.parts())) > 5
    for path in sorted((tmp_path / "kept").iterdir()):
        assert (tmp_path / "written" / path.name).read_bytes() == path.read_bytes()
    assert summarise(read_record(tmp_path / "written")) == summarise(kept)
    for name, line in memory_timelines(kept).items():
        other = memory_timelines(written)[name]
        assert line.times_s.tolist() == other.times_s.tolist()
        assert line.held_bytes.tolist() == other.held_bytes.tolist()
