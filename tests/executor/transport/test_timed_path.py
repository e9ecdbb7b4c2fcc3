"""Paced runs send messages inside a host where traces or other messages decide how long they take.

Messages can only be late on a busy machine, so that these are lower bounds.
"""

from dataclasses import replace

import numpy as np

from executor.backend import TorchBackend
from planner.events.event import EventKind
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Cluster, Link
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import mesh_scenario
from traces.trace import LinkTrace

# A message of a second at 8 Mbit/s.
OUTPUT_BYTES = 1_000_000


def on_one_host(count: int, *links: Link) -> Scenario:
    scenario = mesh_scenario(count, [0.01] * 2, [0.01] * 2, output_bytes=[OUTPUT_BYTES, 0], global_batch=count // 2)
    devices = tuple(replace(device, region="here", host="box") for device in scenario.cluster.devices)
    return replace(scenario, cluster=Cluster(devices, links))


def plan_of(scenario: Scenario, pipelines: int) -> Plan:
    """Pipelines of two stages, each with one microbatch."""
    made = tuple(
        Pipeline(
            (Stage(0, 1, (Replica(f"device-{2 * at}"),), 1), Stage(1, 2, (Replica(f"device-{2 * at + 1}"),), 1)), (1,)
        )
        for at in range(pipelines)
    )
    return Plan(scenario.name, scenario.model.name, "hand", "1f1b", made)


def first_arrivals_s(scenario: Scenario, plan: Plan) -> list[float]:
    events = TorchBackend("paced", emulator="shaper").run(scenario, plan, None, 1).events
    return [each.arrived_s for each in events if each.kind is EventKind.SEND and each.action == "F"]


def test_a_message_waits_for_the_end_of_an_outage_in_the_links_trace() -> None:
    out = LinkTrace(np.array([0.0, 0.3, 1.5]), np.array([8e6, 0.0, 8e6]), 100.0)
    scenario = on_one_host(2, *(Link(f"device-{a}", f"device-{1 - a}", 8e6, 0.0, out) for a in (0, 1)))
    (arrived_s,) = first_arrivals_s(scenario, plan_of(scenario, 1))
    # At most 0.3 of a second's message has passed before the outage.
    assert arrived_s >= 1.5 + 0.65


def test_two_messages_share_the_link_inside_a_host() -> None:
    scenario = on_one_host(4, Link("box", "box", 8e6, 0.0))
    assert max(first_arrivals_s(scenario, plan_of(scenario, 2))) >= 1.95
