"""The feed shows a policy all of a step that has an end; what comes later goes with the next one."""

import json
import os
import threading
from dataclasses import replace

import pytest
from executor.core.control_store import reach_control_store

from executor.backend import TorchBackend
from executor.control.coordinator import Coordinator
from executor.core.job import RunConfig
from executor.core.messages import FINISHED, NewPlan, SessionSpec
from executor.rank.control_client import PlanFeed
from planner.adapt.policy import DECISION_LAG_STEPS, Observation
from planner.events.event import Event, EventKind
from planner.plan.plan import Plan
from tests.helpers.scenarios.builders import chain_plan, chain_scenario

STEPS = 6
UPDATE_S = 0.02


class Seeing:
    """Changes nothing."""

    def __init__(self) -> None:
        self.observations: list[Observation] = []

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        self.observations.append(observation)
        return None


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_policy_sees_the_updates_of_all_steps(clip_norm: float | None) -> None:
    plain = chain_scenario([0.002, 0.002], [0.004, 0.004], global_batch=4)
    layers = tuple(
        replace(layer, update_s={f"kind-{index}": UPDATE_S}) for index, layer in enumerate(plain.model.layers)
    )
    training = replace(plain.training, clip_norm=clip_norm)
    scenario = replace(plain, model=replace(plain.model, layers=layers), training=training)
    policy = Seeing()
    TorchBackend("paced").run(scenario, chain_plan(scenario), policy, STEPS)
    assert [each.step for each in policy.observations] == list(range(STEPS))
    for each in policy.observations:
        # With clipping the row of the update begins where the wait for the norm does.
        assert all(seconds > 4 * 0.006 + UPDATE_S - 1e-6 for _, seconds in each.compute_s)


def update_row(step: int) -> Event:
    return Event(EventKind.UPDATE, "device-0", "device-1", 0, 0, -1, step, "", 1.0, 2.0, 8)


def test_nothing_is_left_of_steps_that_all_have_published() -> None:
    scenario = chain_scenario([1e-3] * 2, [1e-3] * 2)
    plan = chain_plan(scenario)
    (telemetry, to_launcher), (plans, to_agent) = os.pipe(), os.pipe()
    errors: list[Exception] = []
    with (
        os.fdopen(telemetry) as seen,
        os.fdopen(to_launcher, "w") as outbound,
        os.fdopen(plans) as inbound,
        os.fdopen(to_agent, "w") as answers,
    ):
        orders = RunConfig("paced", STEPS, "none", adapts=True)
        coordinator = Coordinator(
            ("127.0.0.1", 0), scenario, plan, plan.devices, orders, outbound, inbound, None, pytest.fail
        )
        address = ("127.0.0.1", coordinator.port)
        store = reach_control_store(address)
        keys_before = store.num_keys()
        beginning = SessionSpec(0, (0, 1), 0, 0, (NewPlan(plan),) * DECISION_LAG_STEPS)
        feeds = [PlanFeed(address, rank, beginning, STEPS, errors.append) for rank in range(2)]

        def run(feed: PlanFeed) -> None:
            for step in range(STEPS):
                assert feed.wait(step).plan == plan
                feed.log(update_row(step))
                if step == STEPS - 1:
                    feed.sending(step)
                feed.finish(step)
                # An update that was applied long after its step.
                if step < STEPS - 1:
                    feed.log(update_row(0))
            feed.release(STEPS - 1)

        ranks = [threading.Thread(target=run, args=(feed,)) for feed in feeds]
        for rank in ranks:
            rank.start()
        for step in range(STEPS):
            asked = json.loads(seen.readline())
            assert asked["step"] == step
            late = [0] if step else []
            assert [[row[6] for row in part["rows"]] for part in asked["parts"]] == [[step, *late]] * 2
            answers.write(json.dumps(None) + "\n")
            answers.flush()
        for rank in ranks:
            rank.join()
        coordinator.finish()
        assert [feed.outcome() for feed in feeds] == [FINISHED] * 2
        # What says so stays.
        assert store.num_keys() == keys_before + 1
    assert errors == []
    assert [len(feed._events) for feed in feeds] == [0, 0]
