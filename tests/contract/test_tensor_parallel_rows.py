"""Groups of devices that share layers: both backends write the same rows, partners' included."""

from dataclasses import replace

from executor.backend import TorchBackend
from planner.adapt.observation import Observation
from planner.adapt.policy import Policy
from planner.events.event import EventKind
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Cluster
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import mesh_scenario
from tests.helpers.strategies.timeless_rows import rows


class Scripted:
    """Changes the plan after step 1."""

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        return plan.with_microbatches(0, (4, 4), (2, 1)) if observation.step == 1 else None


def paired() -> tuple[Scenario, Plan]:
    """A pair before two replicas that are pairs, on a host each; shards take half the time and the memory."""
    scenario = mesh_scenario(
        6, [0.004, 0.006], [0.008, 0.012], link=lambda a, b: (200e6, 0.002), parameter_bytes=[40000, 80000]
    )
    hosts = ("one", "one", "two", "two", "three", "three")
    devices = tuple(replace(device, host=host) for device, host in zip(scenario.cluster.devices, hosts, strict=True))
    whole = scenario.model.layers
    halved = tuple(
        replace(
            layer,
            parameter_bytes=layer.parameter_bytes // 2,
            times={
                kind: replace(
                    table,
                    forward_s=tuple(each / 2 for each in table.forward_s),
                    backward_input_s=tuple(each / 2 for each in table.backward_input_s),
                    backward_weight_s=tuple(each / 2 for each in table.backward_weight_s),
                )
                for kind, table in layer.times.items()
            },
        )
        for layer in whole
    )
    model = replace(scenario.model, sharded={2: ModelProfile("half", halved)})
    training = replace(scenario.training, clip_norm=1.0)
    scenario = replace(scenario, cluster=Cluster(devices, scenario.cluster.links), model=model, training=training)
    names = [device.name for device in devices]
    stages = (
        Stage(0, 1, (Replica(names[0], partners=(names[1],)),), 2),
        Stage(1, 2, (Replica(names[2], 3.0, (names[3],)), Replica(names[4], 1.0, (names[5],))), 1),
    )
    return scenario, Plan(scenario.name, scenario.model.name, "hand", "1f1b", (Pipeline(stages, (4, 2, 2)),))


def test_both_write_the_same_rows() -> None:
    scenario, plan = paired()
    policy: Policy = Scripted()
    simulated = Simulator().run(scenario, plan, policy, 5)
    paced = TorchBackend("paced", emulator="shaper").run(scenario, plan, policy, 5)
    assert rows(simulated) == rows(paced)
    computing = {event.device for event in paced.events if event.kind is EventKind.COMPUTE}
    assert computing == set(plan.devices)
