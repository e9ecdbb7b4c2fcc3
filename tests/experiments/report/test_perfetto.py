import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from experiments.report.perfetto import trace_events, write_perfetto
from planner.events.event import PROBE_ACTION, EventKind
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from planner.systems.deepcee.policy import DepthPolicy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from tests.sim.test_decoupled import HUB, apart
from traces.common.errors import InputError
from traces.trace import LinkTrace


@cache
def simulated() -> RunRecord:
    trace = LinkTrace([0, 1, 3], [120e6, 20e6, 120e6], 5)  # type: ignore[arg-type]
    scenario = chain_scenario(
        [0.003, 0.004], [0.004, 0.006], output_bytes=[65536, 0], latency_s=0.02, trace=trace, global_batch=64
    )
    record = Simulator().run(scenario, chain_plan(scenario, microbatches=[8] * 8), DepthPolicy(scenario), 6)
    assert record.decisions
    return record


def events_of(records: list[RunRecord], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace_events(records)["traceEvents"] if event["ph"] == phase]


def test_every_event_of_the_record_is_there_once() -> None:
    record = simulated()
    slices = events_of([record], "X")
    for kind in (EventKind.COMPUTE, EventKind.SEND, EventKind.RECEIVE):
        expected = sum(event.kind is kind and event.action != PROBE_ACTION for event in record.events)
        assert sum(each["cat"] == kind for each in slices) == expected
    assert all(each["dur"] >= 0 for each in slices)
    first = next(event for event in record.events if event.kind is EventKind.COMPUTE)
    drawn = next(each for each in slices if each["cat"] == "compute")
    assert drawn["name"] == "0F0"
    assert drawn["ts"] == pytest.approx(1e6 * first.start_s)
    assert drawn["dur"] == pytest.approx(1e6 * (first.end_s - first.start_s), abs=1e-3)
    assert drawn["args"] == {"step": 0, "microbatch": 0, "bytes": 0}


def test_slices_of_a_thread_do_not_overlap() -> None:
    threads: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for each in events_of([simulated()], "X"):
        threads[each["pid"], each["tid"]].append(each)
    for slices in threads.values():
        slices.sort(key=lambda each: each["ts"])
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-4


def test_processes_of_several_records_have_names_and_numbers_of_their_own() -> None:
    named = [each for each in events_of([simulated(), simulated()], "M") if each["name"] == "process_name"]
    assert len({each["pid"] for each in named}) == len({each["args"]["name"] for each in named}) == len(named) == 6
    assert named[0]["args"]["name"] == "simulated 1: device-0 (stage 0, region-0)"
    processes = {each["pid"] for each in named}
    both, one = (events_of([simulated()] * count, "X") for count in (2, 1))
    assert len(both) == 2 * len(one)
    assert {each["pid"] for each in both} < processes
    arrows = events_of([simulated(), simulated()], "s")
    assert len({each["id"] for each in arrows}) == len(arrows)


def test_arrows_lead_from_each_send_to_the_compute_that_uses_it() -> None:
    slices = {(each["pid"], each["tid"], each["ts"]): each for each in events_of([simulated()], "X")}
    starts, ends = ({each["id"]: each for each in events_of([simulated()], phase)} for phase in "sf")
    assert set(starts) == set(ends)
    sent = [event for event in simulated().events if event.kind is EventKind.SEND]
    assert len(starts) == sum(event.action != PROBE_ACTION for event in sent)
    for number, start in starts.items():
        shown = slices[start["pid"], start["tid"], start["ts"]]
        used = slices[ends[number]["pid"], ends[number]["tid"], ends[number]["ts"]]
        assert shown["name"] == f"send {used['name']}"
        assert shown["ts"] + shown["dur"] <= used["ts"] + 1e-4


def test_decisions_are_instants() -> None:
    instants = events_of([simulated()], "i")
    assert [each["name"] for each in instants] == [decision.change for decision in simulated().decisions]
    assert [each["args"]["first_step"] for each in instants] == [each.first_step for each in simulated().decisions]


def test_gradient_sums_share_the_compute_thread() -> None:
    chain = chain_scenario([0.002, 0.002], [0.004, 0.004])
    alike = tuple(replace(device, kind="kind-0") for device in chain.cluster.devices)
    scenario = Scenario("chain", Cluster(alike, chain.cluster.links), chain.model, chain.training)
    pipelines = tuple(Pipeline((Stage(0, 2, (Replica(device.name),), 1),), (1,) * 4) for device in alike)
    record = Simulator().run(scenario, Plan("chain", "chain", "hand", "1f1b", pipelines), None, 2)
    slices = events_of([record], "X")
    assert {each["tid"] for each in slices if each["cat"] == "sync"} == {1}
    assert {each["name"] for each in slices if each["cat"] in ("sync", "send")} == {"gradient sync", "send gradients"}
    named = [each["args"]["name"] for each in events_of([record], "M") if each["name"] == "process_name"]
    assert named[1] == "simulated: device-1 (pipeline 1, stage 0, region-1)"


def test_the_file_is_valid_json_and_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_perfetto([simulated()], path)
    assert json.loads(path.read_text()) == trace_events([simulated()])
    with pytest.raises(InputError, match="does not exist"):
        write_perfetto([simulated()], tmp_path / "none" / "trace.json")
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_that_only_takes_outer_steps_has_its_sends() -> None:
    record = Simulator().run(*apart([1.0, 2.5], [0.5], 2, OuterStep(quorum=1), 0.25), None, 6)
    names = {each["pid"]: each["args"]["name"] for each in events_of([record], "M") if each["name"] == "process_name"}
    (hub,) = [number for number, name in names.items() if name.endswith("hub (outer steps)")]
    sent = [event for event in record.events if event.kind is EventKind.SEND and event.device == HUB]
    assert len([each for each in events_of([record], "X") if each["pid"] == hub and each["cat"] == "send"]) == len(sent)
    assert sent
