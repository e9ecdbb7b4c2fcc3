"""Decoupled DiLoCo: against one process that applies the same updates, and where it must equal other methods."""

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.core.control_channel import Channel
from executor.core.messages import AwayWorker, CheckpointMark
from executor.rank.syncer import Syncer
from executor.runtime.decoupled.links import MARK
from executor.runtime.decoupled.updates import DecoupledUpdates
from executor.runtime.outer.state import OuterState
from executor.training.flat_state import FlatParameters
from planner.check import check_plan
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.scenario.scenario import Scenario
from tests.executor.runtime.test_outer_steps import (
    LAYERS,
    OPTIMIZERS,
    TOLERANCE,
    assert_equal,
    compressed,
    scenario_of,
    streams,
    trained,
)
from tests.helpers.processes.apart import Apart
from tests.helpers.strategies.manual_syncer import ManualWorkers
from tests.helpers.strategies.manual_transport import SetClock


def apart(scenario: Scenario, samples: Sequence[int], every: int, outer: OuterStep, method: str = "") -> Plan:
    """A device for each pipeline, and the last one of the scenario for the outer steps."""
    *devices, hub = scenario.cluster.devices
    pipelines = tuple(
        Pipeline((Stage(0, LAYERS, (Replica(device.name),), 2),), (count - 1, 1))
        for device, count in zip(devices, samples, strict=True)
    )
    outer = outer if method else replace(outer, syncers=(hub.name,))
    how = Synchronisation(method or "diloco-decoupled", interval_steps=every, outer=outer)
    plan = Plan(scenario.name, scenario.model.name, "hand", "compact-zb", pipelines, synchronisation=how)
    check_plan(plan, scenario)
    return plan


@settings(max_examples=2)
@given(st.data())
def test_all_workers_at_one_speed_equal_streaming(data: st.DataObject) -> None:
    assert_equals_streaming(data)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_all_workers_at_one_speed_equal_streaming_in_many_cases(data: st.DataObject) -> None:
    assert_equals_streaming(data)


def assert_equals_streaming(data: st.DataObject) -> None:
    """To the bit: the quorum is of all workers, and everything arrives in time; with compression, too."""
    samples = data.draw(st.sampled_from([(12,), (6, 6), (5, 3, 4)]))
    every, outer = data.draw(streams())
    packed = data.draw(compressed())
    outer = replace(outer, compression=packed.compression, density=packed.density, feedback=packed.feedback)
    # A syncer sends no compressed means.
    outer, streaming = replace(outer, exchange=None), replace(outer, exchange="allgather")
    scenario = scenario_of(len(samples) + 1, data.draw(st.sampled_from(OPTIMIZERS)))
    steps = data.draw(st.integers(1, 6))
    expected = trained(scenario, apart(scenario, samples, every, streaming, "diloco-streaming"), steps)
    workers = ManualWorkers(scenario, apart(scenario, samples, every, outer))
    for _ in range(steps):
        for w in range(len(samples)):
            workers.step(w)
        for w in range(len(samples)):
            workers.arrive(w)
        for w in range(len(samples)):
            workers.deliver(w)
    workers.finish()
    for w, parameters in enumerate(expected):
        assert_equal(workers.parameters(w), parameters)


@settings(max_examples=3)
@given(st.data())
def test_any_course_of_events_equals_one_process_that_applies_the_same_updates(data: st.DataObject) -> None:
    assert_follows_one_process(data)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.data())
def test_many_courses_of_events_equal_one_process_that_applies_the_same_updates(data: st.DataObject) -> None:
    assert_follows_one_process(data)


def assert_follows_one_process(data: st.DataObject) -> None:
    """Workers take steps in any order, and messages arrive whenever; the mean is weighted by samples."""
    samples = data.draw(st.sampled_from([(6, 6), (5, 3, 4)]))
    count = len(samples)
    outer = OuterStep(
        overlap_steps=data.draw(st.integers(0, 1)),
        mixing=data.draw(st.sampled_from([0.0, 0.5])),
        quorum=data.draw(st.integers(1, count)),
    )
    scenario = scenario_of(count + 1, data.draw(st.sampled_from(OPTIMIZERS)))
    plan = apart(scenario, samples, 2, outer)
    workers, other = ManualWorkers(scenario, plan), Apart(scenario, plan)
    # What the rules of the paper give, for all layers at once: who waits at the syncer, and what workers know.
    there: list[int] = []
    under_way: list[list[tuple[int, bool]]] = [[] for _ in samples]
    arrived: list[list[tuple[int, bool]]] = [[] for _ in samples]
    asked: list[int | None] = [None] * count
    version = 0
    for _ in range(data.draw(st.integers(4, 16))):
        w = data.draw(st.integers(0, count - 1))
        match data.draw(st.sampled_from(["step", "step", "arrive", "deliver"])):
            case "step":
                newest = max(arrived[w], default=None)
                answered = any(mine for _, mine in arrived[w])
                sent = asked[w]
                if newest is not None and (sent is None or (answered and workers.next[w] > sent + outer.overlap_steps)):
                    for layer in other.layers:
                        other.take(w, layer, newest[0])
                    arrived[w] = []
                    asked[w] = None if answered else asked[w]
                other.train(w)
                if other.steps[w] % 2 == 0 and asked[w] is None:
                    other.send(w, other.layers)
                    asked[w] = other.steps[w] - 1
                workers.step(w)
            case "arrive":
                if workers.links[w].up:
                    there = sorted({*there, w})
                if len(there) >= (outer.quorum or count):
                    other.merge(there, other.layers)
                    version += 1
                    for receiver in range(count):
                        under_way[receiver].append((version, receiver in there))
                    there = []
                workers.arrive(w)
            case "deliver":
                arrived[w] += under_way[w]
                under_way[w] = []
                workers.deliver(w)
    for w in range(count):
        torch.testing.assert_close(workers.parameters(w), other.parameters(w), rtol=1e-5, atol=TOLERANCE)
    for layer in other.layers:
        values = torch.cat([each.detach().flatten() for each in other.common[layer].parameters()])
        torch.testing.assert_close(workers.common.parameters(layer), values, rtol=1e-5, atol=TOLERANCE)


def test_a_replaced_worker_begins_with_the_common_parameters_and_the_optimizer_of_another() -> None:
    scenario = scenario_of(3, OPTIMIZERS[2])
    workers = ManualWorkers(scenario, apart(scenario, (6, 6), 2, OuterStep(mixing=0.5, quorum=1)))
    for _ in range(4):
        workers.step(0)
        workers.arrive(0)
        workers.deliver(0)
    assert workers.next == [4, 0]
    workers.step(1)
    workers.replace(1, giver=0)
    workers.interpreters[1]._updates.begin(1)  # type: ignore[union-attr]
    for layer, own in workers.layers(1).items():
        assert torch.equal(own, workers.common.parameters(layer))
        giver, joined = (
            compute._rule.state(each)
            for compute in workers.computes[:2]
            for each in list(compute.layers[layer].parameters())[:1]
        )
        assert any(bool(array.any()) for array in giver)
        assert all(torch.equal(one, other) for one, other in zip(giver, joined, strict=True))


@given(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5), st.sampled_from([0.0, 0.5, 0.9]))
def test_parts_of_an_outer_step_are_together_a_whole_one(parts: list[float], momentum: float) -> None:
    """With the same pseudo-gradient; also the momentum is the same then, as the whole one after them shows."""
    shares = [part / sum(parts) for part in parts]
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2, 2).double() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    states = [OuterState(OuterStep(0.5, momentum), lambda _, own=own: FlatParameters([own]), [0], {}) for own in layers]
    for mean in torch.randn(3, 6):
        for state, whole in zip(states, ([1.0], shares), strict=True):
            for share in whole:
                state.average(0, {0: mean.view(torch.uint8)}, {0: 1.0})
                state.advance(0, share)
        torch.testing.assert_close(states[1].common(0), states[0].common(0), rtol=1e-5, atol=1e-5)


def test_a_version_of_others_keeps_the_progress_that_was_not_sent() -> None:
    scenario = scenario_of(3, OPTIMIZERS[2])
    workers = ManualWorkers(scenario, apart(scenario, (6, 6), 4, OuterStep(quorum=1)))
    for _ in range(4):
        workers.step(0)
    workers.step(1)
    common = {layer: workers.common.parameters(layer) for layer in workers.common.layers}
    progress = {layer: own - common[layer] for layer, own in workers.layers(1).items()}
    workers.arrive(0)
    workers.deliver(1)
    workers.interpreters[1]._updates.begin(1)  # type: ignore[union-attr]
    for layer, own in workers.layers(1).items():
        assert not torch.equal(workers.common.parameters(layer), common[layer])
        torch.testing.assert_close(own - workers.common.parameters(layer), progress[layer], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("marks", [True, False])
def test_what_a_syncer_sends_after_its_copy_waits_for_the_copy_of_the_worker(marks: bool) -> None:
    """Or for the steps before which the head would have it made."""
    workers = ManualWorkers(scenario_of(2), apart(scenario_of(2), (12,), 1, OuterStep()))
    updates = workers.interpreters[0]._updates
    assert isinstance(updates, DecoupledUpdates)
    workers.step(0)
    workers.arrive(0)
    workers.links[0].down[0] = replace(workers.links[0].down[0], snapshot=7)
    workers.deliver(0)
    known = []
    for _ in range(3):
        if marks and workers.next == [2]:
            updates.mark(CheckpointMark(7))
        workers.step(0)
        known.append(set(updates.versions.values()))
    assert known == [{0}, {1}, {1}] if marks else [{0}, {0}, {1}]


def test_one_worker_without_outer_optimizer_trains_as_if_it_were_alone() -> None:
    """The outer steps change nothing, since they arrive before the next step."""
    scenario = scenario_of(2, OPTIMIZERS[2])
    workers = ManualWorkers(scenario, apart(scenario, (12,), 2, OuterStep(1.0, 0.0)))
    alone = trained(scenario, apart(scenario, (12,), 2, OuterStep(1.0, 0.0), "diloco"), 6)
    for _ in range(6):
        workers.step(0)
        workers.arrive(0)
        workers.deliver(0)
    workers.finish()
    assert_equal(workers.parameters(0), alone[0])


class SilentChannel(Channel):
    """A connection on which the other end says nothing."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def receive(self) -> None:
        self._closed.wait()

    def send(self, kind: str, payload: bytes = b"", **fields: object) -> None:
        """Nobody hears it."""

    def close(self) -> None:
        self._closed.set()


class SyncerAlone(Syncer):
    """A syncer whose events the test makes, with the devices of two workers; what it would write is kept."""

    def __init__(self) -> None:
        scenario, self.written = scenario_of(3), dict[int, tuple[AwayWorker, ...]]()
        plan, run = apart(scenario, (6, 6), 1, OuterStep(quorum=1)), SimpleNamespace(steps=99, checkpoint_every=1)
        config = SimpleNamespace(plan=plan, scenario=scenario, device="device-2", run=run)
        context = SimpleNamespace(outer={}, clock=SetClock(), shaper=None)
        client = SimpleNamespace(own_address="127.0.0.1", call_on=lambda *_: None, send=lambda *_, **__: None)
        super().__init__(cast(Any, config), cast(Any, context), None, cast(Any, client), lambda error: None)
        self._listening.close()

    def join(self, worker: int, session: int) -> None:
        self._join(self._holders[f"device-{worker}"], SilentChannel(), session, dict.fromkeys(range(LAYERS), 0))

    def lose(self, worker: int, session: int) -> None:
        """As the head says it; the connection itself may look well."""
        self._end_session({"kind": "lost", "session": session, "devices": [f"device-{worker}"]})

    def mark(self, worker: int, mark: CheckpointMark) -> None:
        words = json.loads(json.dumps({"kind": MARK, **mark.to_data()}))
        self._hear(self._holders[f"device-{worker}"], words, torch.empty(0), 0.0)

    def _write(self, checkpoint: int, layers: object, away: tuple[AwayWorker, ...]) -> None:
        self.written[checkpoint] = away


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_syncer_leaves_workers_out_that_were_away_and_no_others(is_heard: bool) -> None:
    """Whether or not it has heard from the head that the worker is lost."""
    syncer, away = SyncerAlone(), (AwayWorker(1, 5, 1),)
    for worker in (0, 1):
        syncer.join(worker, 0)
    syncer.mark(0, CheckpointMark(1))
    assert not syncer.written
    syncer.mark(1, CheckpointMark(1))
    assert syncer.written == {1: ()}
    if is_heard:
        syncer.lose(1, 0)
    syncer.mark(0, CheckpointMark(2, away))
    assert syncer.written == {1: (), 2: away}
    # It has joined again since the head began this checkpoint, and may have been lost then.
    syncer.join(1, 1)
    syncer.mark(0, CheckpointMark(3, away))
    syncer.lose(1, 1)
    syncer.mark(0, CheckpointMark(4, away))
    assert syncer.written == {1: (), 2: away}
    later = (AwayWorker(1, 7, 2),)
    syncer.mark(0, CheckpointMark(5, later))
    assert syncer.written == {1: (), 2: away, 5: later}
