"""Devices that come back are taken up by a plan: training equals what nothing has disturbed."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from executor.backend import TorchBackend
from executor.core.liveness import beat_path
from executor.rank.telemetry import read_samples
from planner.adapt.observation import Observation
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.events.event import EventKind
from planner.plan.plan import Plan
from planner.runs.event_totals import step_ends_s
from planner.scenario.faults import Absence
from planner.scenario.scenario import Scenario
from tests.helpers.processes.blows import strike
from tests.helpers.processes.training import assert_trained, chain, hybrid_plan, train_in_one_process

# Their processes need seconds to start, and a step takes some 60 ms.
STEPS = 200
LATENCY_S = 0.015
# Longer than the two steps until a decision takes effect, shorter than a stopped process is let live.
DELAY_S = 0.7


class TakesUp:
    """Goes on without a device that has gone, and takes it up once nothing is away; waits for others that have gone.

    Args:
        home: The plan with all devices.
        rest: Does without the one.
        deciding: Called when it has decided to go home, before anybody hears of that.
    """

    def __init__(self, home: Plan, rest: Plan, deciding: Callable[[], None] = lambda: None) -> None:
        self._home = home
        self._rest = rest
        self._deciding = deciding

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        if observation.gone:
            return None if set(observation.gone) & set(self._rest.devices) else self._rest
        if observation.away or plan == self._home:
            return None
        self._deciding()
        return self._home


def case(rank: int) -> tuple[Scenario, Plan, Plan]:
    """A scenario of four devices, a plan with all of them and one without one; all links take their time."""
    scenario, plan = chain()
    layers = len(scenario.model.layers)
    left = tuple(device for number, device in enumerate(scenario.cluster.devices) if number != rank)
    smaller = replace(scenario, cluster=replace(scenario.cluster, devices=left))
    rest = hybrid_plan(smaller, "1f1b", [([(1, [1.0]), (4, [1.0]), (layers - 5, [1.0])], [2] * 6)])
    links = tuple(replace(link, latency_s=LATENCY_S) for link in scenario.cluster.links)
    # With a norm the update of a step is made when the next one begins.
    training = replace(scenario.training, clip_norm=0.5)
    return replace(scenario, cluster=replace(scenario.cluster, links=links), training=training), plan, rest


def delay_next(beat: Path, lost: int) -> None:
    """Stop the process that replaces a lost one for `DELAY_S`, before it can join a session."""
    process = lost
    while process == lost:
        time.sleep(0.001)
        # The agent removes the file of a lost process, and the next process writes its own.
        with suppress(FileNotFoundError, ValueError):
            process = int(beat.read_text())
    os.kill(process, signal.SIGSTOP)
    time.sleep(DELAY_S)
    os.kill(process, signal.SIGCONT)


@pytest.mark.parametrize("rank", [pytest.param(0, id="first"), pytest.param(2, id="replica")])
@pytest.mark.slow
def test_a_device_that_returns_is_taken_up_by_the_policy(rank: int, tmp_path: Path) -> None:
    scenario, plan, rest = case(rank)
    scenario = replace(scenario, faults=(Absence(f"device-{rank}", 1.0, 1.5),))
    target = tmp_path / "parameters.safetensors"
    backend = TorchBackend("real", emulator="shaper", parameters=target, backup_every=1)
    record = backend.run(scenario, plan, TakesUp(plan, rest), STEPS)
    lost, taken_up = record.decisions
    assert lost.answers_departure
    assert lost.plan == rest
    assert taken_up.plan == plan
    assert taken_up.first_step < STEPS - 5
    # Part of the step in which it was lost, and of those that some had begun, was done twice; nothing later was.
    later = [event for event in record.events if event.kind is EventKind.COMPUTE and event.step > lost.first_step + 2]
    assert len({(e.device, e.action, e.step, e.microbatch) for e in later}) == len(later)
    absent = [event for event in record.events if event.kind is EventKind.FAULT]
    assert [(event.device, event.action) for event in absent] == [(f"device-{rank}", "absent")]
    assert absent[0].end_s < max(event.end_s for event in record.events)
    assert len(step_ends_s(record.events)) == STEPS
    assert_trained(record, target, train_in_one_process(scenario, STEPS))


@pytest.mark.slow
def test_who_is_lost_again_before_it_is_taken_up_is_gone_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario, plan, rest = case(3)
    scenario = replace(scenario, faults=(Absence("device-3", 1.0, 1.5),))
    struck = []

    def strike_once() -> None:
        if not struck:
            (job,) = tmp_path.glob("ropebridge-*")
            struck.append(int(beat_path(job, 3).read_text()))
            os.kill(struck[0], signal.SIGKILL)
            threading.Thread(target=delay_next, args=(beat_path(job, 3), struck[0]), daemon=True).start()

    target = tmp_path / "parameters.safetensors"
    backend = TorchBackend("real", emulator="shaper", parameters=target, backup_every=1)
    record = backend.run(scenario, plan, TakesUp(plan, rest, strike_once), STEPS)
    assert [each.plan for each in record.decisions] == [rest, plan, rest, plan]
    assert_trained(record, target, train_in_one_process(scenario, STEPS))


@pytest.mark.slow
def test_a_rank_that_is_lost_right_after_another_one_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its layers as they were when all began anew there is no second copy yet: older ones count."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario, plan, rest = case(2)
    scenario = replace(scenario, faults=(Absence("device-2", 1.0, 1.5),))
    killers = []

    def strike_when_joined() -> None:
        if killers:
            return
        (job,) = tmp_path.glob("ropebridge-*")
        # What is decided now holds from the step after next on.
        step = max(each.step for each in read_samples(job / "resources-0.jsonl")) + DECISION_LAG_STEPS
        killers.append(threading.Thread(target=strike, args=(tmp_path, 0, step, signal.SIGKILL), daemon=True))
        killers[0].start()

    target = tmp_path / "parameters.safetensors"
    backend = TorchBackend("real", emulator="shaper", parameters=target, backup_every=1)
    record = backend.run(scenario, plan, TakesUp(plan, rest, strike_when_joined), STEPS)
    assert len(killers) == 1
    assert not killers[0].is_alive()
    lost, taken_up = record.decisions
    computed = [event for event in record.events if event.kind is EventKind.COMPUTE]
    between = [event for event in computed if lost.first_step + 2 < event.step < taken_up.first_step - 4]
    assert len({(e.device, e.action, e.step, e.microbatch) for e in between}) == len(between)
    assert_trained(record, target, train_in_one_process(scenario, STEPS))
