"""The feed shows a policy all of a step that has an end; what comes later goes with the next one."""

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from executor.backend import TorchBackend
from executor.control.coordinator import Coordinator
from executor.control.launcher import prepared_job
from executor.control.policy_driver import PolicyDriver
from executor.core.control_channel import HEAD_ADDRESS
from executor.core.events import StepPublisher
from executor.core.job import RunConfig
from executor.core.messages import SessionSpec
from executor.rank.control_client import FINISHED, ControlClient
from planner.events.event import Event, EventKind
from planner.plan.plan import Plan
from tests.helpers.processes.control import serving
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from tests.helpers.strategies.scripted_policy import Scripted

STEPS = 6
UPDATE_S = 0.02


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_policy_sees_the_updates_of_all_steps(clip_norm: float | None) -> None:
    plain = chain_scenario([0.002, 0.002], [0.004, 0.004], global_batch=4)
    layers = tuple(
        replace(layer, update_s={f"kind-{index}": UPDATE_S}) for index, layer in enumerate(plain.model.layers)
    )
    training = replace(plain.training, clip_norm=clip_norm)
    scenario = replace(plain, model=replace(plain.model, layers=layers), training=training)
    policy = Scripted({})
    TorchBackend("paced").run(scenario, chain_plan(scenario), policy, STEPS)
    assert [each.step for each in policy.seen] == list(range(STEPS))
    for each in policy.seen:
        # With clipping the row of the update begins where the wait for the norm does.
        assert all(seconds > 4 * 0.006 + 0.75 * UPDATE_S for _, seconds in each.compute_s)


def update_row(step: int) -> Event:
    return Event(EventKind.UPDATE, "device-0", "device-1", 0, 0, -1, step, "", 1.0, 2.0, 8)


class Noting:
    """A driver that changes nothing, and notes which steps' rows each part of a step has."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[list[int]]]] = []

    def finish_step(self, step: int, parts: Sequence[dict[str, Any]], away: list[str]) -> None:
        self.seen.append((step, [[row[6] for row in part["rows"]] for part in parts]))


def send_step(client: ControlClient, step: int, part: dict[str, Any]) -> None:
    client.send("step", session=0, step=step, part=part)


def publish(client: ControlClient, publisher: StepPublisher, plan: Plan) -> None:
    """What a rank does in a run, as far as its head hears of that."""
    for step in range(STEPS):
        assert client.wait(step).plan == plan
        publisher.log(update_row(step))
        if step == STEPS - 1:
            publisher.sending(step)
        publisher.finish(step)
        # An update that was applied long after its step.
        if step < STEPS - 1:
            publisher.log(update_row(0))
    publisher.release(STEPS - 1)


def test_nothing_is_left_of_steps_that_all_have_published(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = chain_scenario([1e-3] * 2, [1e-3] * 2)
    plan, driver = chain_plan(scenario), Noting()
    config = RunConfig("paced", STEPS, "none", adapts=True)
    with prepared_job(scenario, plan, config) as job, serving(job, 2) as head:
        monkeypatch.setenv(HEAD_ADDRESS, json.dumps([*head.address, 0.0]))
        coordinator = Coordinator(job, plan.devices, None, head.server, cast(PolicyDriver, driver))
        steering = threading.Thread(target=coordinator.run)
        steering.start()
        assert head.agent.receive() is not None
        for rank in range(2):
            assert head.agent.receive() == {"kind": "start", "rank": rank, "incarnation": 0}
        clients = [ControlClient(job, rank, f"rank {rank}") for rank in range(2)]
        publishers = [StepPublisher(partial(send_step, client), 0, lambda: None) for client in clients]
        for client in clients:
            client.begin(SessionSpec.of_run(plan, 2, config, ""))
        ranks = [
            threading.Thread(target=publish, args=(client, publisher, plan))
            for client, publisher in zip(clients, publishers, strict=True)
        ]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
        assert [client.outcome() for client in clients] == [FINISHED] * 2
        for rank in range(2):
            head.agent.send("ended", rank=rank, incarnation=0, status=0, failure=None, stuck="", printed="")
        steering.join()
        for client in clients:
            client._channel.close()
        assert driver.seen == [(step, [[step, 0] if step else [step]] * 2) for step in range(STEPS)]
        assert not coordinator._session._published
        assert [len(publisher._events) for publisher in publishers] == [0, 0]
