"""Baselines that use Asteroid's planner with other rules: DAPPLE and HetPipe.

DAPPLE (Fan et al., PPoPP 2021) makes one pipeline of groups, but takes devices for equal. As Asteroid's comparison
describes it [second-hand]: mean speeds of the devices, equal shares inside a group, depths K = P - p. Assumed: the same
round latency and the same exact search as Asteroid's, so that the two differ in these three things alone; devices in
the cluster's order; shares equal as far as memory allows.

HetPipe (Park et al., USENIX ATC 2020) is data parallelism over virtual workers, each a pipeline over unlike devices, so
that all virtual workers are equivalent [paper]: devices, fastest first, are dealt to the first worker up to the last
and from there back to the first. HetPipe's workers exchange updates through parameter servers with bounded staleness;
here gradients are summed in every step, so that the update rule is that of all other plans. Assumed: every worker takes
an equal part of the batch; its devices are sorted by memory, one a stage, with depths K = P - p, split with the least
round latency (HetPipe minimises the slowest stage); the number of workers is the one with the shortest step by
`planner.step.evaluate.step_time_s`; a worker with more devices than layers leaves its slowest out.
"""

from planner.cost.in_flight import no_split_fits
from planner.plan.microbatches import even_cut
from planner.plan.plan import Pipeline, Plan
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.asteroid.stage_costs import levelled
from planner.systems.asteroid.strategy import HybridRules, hybrid_pipeline, hybrid_plan, plain_depth


def dapple(scenario: Scenario) -> Plan:
    """Return one pipeline of groups, planned for devices of mean speed.

    Raises:
        InputError: No split fits into memory.
    """
    return hybrid_plan(levelled(scenario), scenario.cluster.devices, "dapple", HybridRules(depth=plain_depth))


def hetpipe(scenario: Scenario) -> Plan:
    """Return equivalent pipelines over unlike devices.

    Raises:
        InputError: No split fits into memory.
    """
    # A worker is a pipeline: it has two devices or more, if the cluster has, and one sample or more.
    most = max(1, min(len(scenario.cluster.devices) // 2, scenario.training.global_batch))
    plans = [plan for count in range(1, most + 1) if (plan := _with_workers(scenario, count)) is not None]
    if not plans:
        raise no_split_fits(scenario, "hetpipe")
    return min(plans, key=lambda plan: step_time_s(plan, scenario))


def _with_workers(scenario: Scenario, count: int) -> Plan | None:
    pipelines: list[Pipeline] = []
    rules = HybridRules(depth=plain_depth, widest=1)
    for devices, samples in zip(_dealt(scenario, count), even_cut(scenario.training.global_batch, count), strict=True):
        pipeline = hybrid_pipeline(scenario, devices, samples, rules)
        if pipeline is None:
            return None
        pipelines.append(pipeline)
    return Plan(scenario.name, scenario.model.name, "hetpipe", "1f1b", tuple(pipelines))


def _dealt(scenario: Scenario, count: int) -> list[list[Device]]:
    """The devices of each worker, sorted by memory; devices are dealt by speed, to and fro."""
    layers = len(scenario.model.layers)

    def whole_model_s(device: Device) -> float:
        return scenario.model.times(0, layers, device.kind, 1).total_s

    workers: list[list[Device]] = [[] for _ in range(count)]
    for index, device in enumerate(sorted(scenario.cluster.devices, key=whole_model_s)):
        turn, place = divmod(index, count)
        workers[place if turn % 2 == 0 else count - 1 - place].append(device)
    return [sorted(worker[:layers], key=lambda device: -device.memory_bytes) for worker in workers]
