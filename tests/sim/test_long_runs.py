"""A simulation that writes its events as it goes has the same results."""

import gc
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from experiments.runs.folder import EVENTS, read_record, summarise, write_record
from planner.events import file as event_file
from planner.events.event import Event, in_order, write_events
from planner.events.file import EventFile, EventSpool
from planner.events.log import FIELDS, TEXTS, EventLog
from planner.runs.event_totals import step_ends_s
from planner.runs.memory_timeline import memory_timelines
from planner.scenario.faults import Absence
from sim import recorder
from sim.network.network import Network
from sim.simulator import Simulator
from tests.helpers.processes.command import COMMAND
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


def test_networks_of_earlier_epochs_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tables are large, and a policy that moves layers begins epoch after epoch."""
    scenario = scenario_with([])
    plan, rest = stages_on(scenario, [0, 1, 2]), stages_on(scenario, [0, 2])
    networks: WeakSet[Network] = WeakSet()
    begin = Network.__init__

    def begin_seen(network: Network, *rest: Any) -> None:
        networks.add(network)
        begin(network, *rest)

    monkeypatch.setattr(Network, "__init__", begin_seen)
    changes = {3 * number: rest if number % 2 else plan for number in range(1, 8)}
    record = Simulator().run(scenario, plan, Scripted(changes), 24)
    assert len(record.decisions) > 5
    gc.collect()
    assert not networks


WEEK_S = 7 * 86_400.0
MOST_BYTES = 2**30


LAYER = {
    "name": "block",
    "repeat": 9,
    "parameters": "4 MB",
    "output": "1 MB",
    "activation": "4 MB",
    "forward": "12 GFLOP",
}


def a_week_with_faults() -> str:
    """A scenario on links that sway, in which each day a device leaves, another one hangs, and a link is out."""
    regions = ("cloud", "edge", "end")
    faults: list[dict[str, str]] = []
    for day in range(7):
        faults += [
            {"device": "at-end", "leaves": f"{24 * day + 3} h", "returns": f"{24 * day + 5} h"},
            {"device": "at-edge", "hangs": f"{24 * day + 9} h", "goes_on": f"{24 * day + 9.02} h"},
            {"link": "cloud->edge", "out": f"{24 * day + 15} h", "back": f"{24 * day + 15.1} h"},
        ]
    devices = [{"name": f"at-{region}", "kind": "jetson-nano", "region": region} for region in regions]
    links = [
        {"between": list(ends), "latency": "10 ms", "trace": {"preset": "lte", "mean": "60 Mbit/s", "seed": seed}}
        for seed, ends in enumerate(combinations(regions, 2))
    ]
    scenario = {
        "name": "week",
        "model": {"name": "nine-blocks", "layers": [LAYER]},
        "cluster": {"devices": devices, "links": links},
        "training": {"global_batch": 8},
        "faults": faults,
    }
    return yaml.safe_dump(scenario)


@pytest.mark.slow
def test_a_week_with_faults_fits_into_a_gigabyte(tmp_path: Path) -> None:
    (tmp_path / "week.yaml").write_text(a_week_with_faults())
    options = ["--policy=auto", "--duration=168 h", "-o", "week"]
    # A small process starts the command, whose peak would else be that of the process of the tests at least.
    program = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
    program += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    command = [sys.executable, "-c", program, *COMMAND, "simulate", "week.yaml", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    peak_bytes = 1024 * int(done.stdout.splitlines()[-1])
    events = read_record(tmp_path / "week").events
    ends_s = step_ends_s(events)
    print(f"MEASURED {len(ends_s)} steps, {len(events)} events, {peak_bytes / 2**20:.0f} MiB")
    assert peak_bytes < MOST_BYTES
    assert 0.99 * WEEK_S < ends_s[-1] < 1.01 * WEEK_S
