"""Hybrid pipelines as baselines: PipeDream, and, by Asteroid's planner with other rules, DAPPLE and HetPipe.

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

from functools import cache
from itertools import accumulate, pairwise
from math import ceil, inf

from planner.cost.in_flight import no_split_fits
from planner.cost.layers import mean_compute_s
from planner.cost.network import nominal_path
from planner.plan.microbatches import even_cut, even_microbatches
from planner.plan.plan import Pipeline, Plan, Replica, Stage
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
    """Return the devices of each worker, sorted by memory; devices are dealt by speed, to and fro."""
    layers = len(scenario.model.layers)

    def whole_model_s(device: Device) -> float:
        return scenario.model.times(0, layers, device.kind, 1).total_s

    workers: list[list[Device]] = [[] for _ in range(count)]
    for index, device in enumerate(sorted(scenario.cluster.devices, key=whole_model_s)):
        turn, place = divmod(index, count)
        workers[place if turn % 2 == 0 else count - 1 - place].append(device)
    return [sorted(worker[:layers], key=lambda device: -device.memory_bytes) for worker in workers]


def pipedream(scenario: Scenario) -> Plan:
    """Return one pipeline of replicated stages, the slowest as fast as possible (Narayanan et al., SOSP 2019).

    With T(i..j) the compute time of layers i to j, W their parameter bytes, act_k the output bytes of layer k and BW
    the bandwidth, the best slowest time for the first j layers on m devices is::

        A(j, m) = min over k < j, n < m of max( A(k, m - n),
                                                2 * act_k / (BW * n),
                                                (T(k+1..j) + 4 (n - 1) W(k+1..j) / (BW n)) / n )

    It assumes equal devices and one bandwidth; here (assumed) a layer's time is its mean over the devices, and BW is
    the narrowest declared link between devices that follow each other in the cluster. Depths are the paper's: as many
    microbatches as devices follow for each replica. Weights are not stashed: the pipeline is flushed every step, so
    that the update rule is that of synchronous training.

    It ignores memory: `check_plan` may refuse the plan.
    """
    devices = [device.name for device in scenario.cluster.devices]
    microbatches = even_microbatches(scenario, scenario.training.global_batch, len(devices))
    stages = []
    used = 0
    for first_layer, end_layer, width in _split(scenario, max(microbatches)):
        replicas = tuple(Replica(name) for name in devices[used : used + width])
        stages.append(Stage(first_layer, end_layer, replicas, in_flight=ceil((len(devices) - used) / width)))
        used += width
    # A synchronous flush needs depths that never grow along the stages, an asynchronous pipeline does not.
    depths = list(accumulate((stage.in_flight for stage in reversed(stages)), max))[::-1]
    pipeline = Pipeline(tuple(stages), microbatches).with_depths(depths)
    return Plan(scenario.name, scenario.model.name, "pipedream", "1f1b", (pipeline,))


def _split(scenario: Scenario, samples: int) -> list[tuple[int, int, int]]:
    """Stages as (first layer, end layer, number of devices), in order."""
    model, cluster = scenario.model, scenario.cluster
    time_until_s: list[float] = mean_compute_s(scenario, samples).tolist()
    bytes_until = [0, *accumulate(layer.parameter_bytes for layer in model.layers)]
    paths = [nominal_path(scenario, a.name, b.name) for a, b in pairwise(cluster.devices)]
    bytes_per_s = min((path.rate_bps for path in paths), default=inf) / 8

    def stage_s(first: int, end: int, width: int) -> float:
        weights = bytes_until[end] - bytes_until[first]
        return (time_until_s[end] - time_until_s[first] + 4 * (width - 1) * weights / (bytes_per_s * width)) / width

    @cache
    def best(end: int, devices: int) -> tuple[float, tuple[tuple[int, int, int], ...]]:
        """Least time of the slowest stage for the first ``end`` layers on ``devices`` devices, and these stages."""
        choice: tuple[float, tuple[tuple[int, int, int], ...]]
        choice = (stage_s(0, end, devices), ((0, end, devices),))
        for cut in range(1, end):
            transfer_s = 2 * samples * model.layers[cut - 1].output_bytes / bytes_per_s
            for width in range(1, devices):
                before_s, before = best(cut, devices - width)
                slowest_s = max(before_s, transfer_s / width, stage_s(cut, end, width))
                if slowest_s < choice[0]:
                    choice = (slowest_s, (*before, (cut, end, width)))
        return choice

    return list(best(len(model.layers), len(cluster.devices))[1])
