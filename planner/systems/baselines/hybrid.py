"""Baseline strategies ``pipedream``, ``dapple`` and ``hetpipe``, which combine pipelines with data parallelism.

A group is the set of devices that hold the same stage as replicas. A depth is the number of microbatches in flight at
stage p of P, with p counted from 0. ``dapple`` and ``hetpipe`` use Asteroid's search
(`planner.systems.asteroid.strategy`), which minimises Asteroid's round latency, with other rules. `pipedream` has a
recursion of its own.

DAPPLE (Fan et al., PPoPP 2021) makes one pipeline of groups and plans as if all devices were equal. The rules follow
the Asteroid paper's description, as other publications give it: each layer's time is its mean over all devices, the
replicas of a group take equal shares, and depths are P - p. Assumption: devices keep the cluster's order, shares are
equal as far as memory allows, and the rest is as in Asteroid.

HetPipe (Park et al., USENIX ATC 2020) trains with data parallelism over virtual workers. Each virtual worker is a
pipeline over unlike devices, and all are about equally fast. Devices, sorted from fastest to slowest, are dealt to
workers 1 to n, the next n devices to workers n to 1, and so on. The original exchanges updates through parameter
servers with bounded staleness; here gradients are summed in every step, as in other plans. Assumption:

- Every worker takes an equal part of the batch.
- The devices of a worker are sorted by memory, hold one stage each, and have depths P - p.
- Layers are split for the least round latency; the original minimises the time of the slowest stage.
- The number of workers is the one with the shortest step by `planner.step.evaluate.step_time_s`.
- A worker with more devices than the model has layers leaves its slowest devices out.
"""

from itertools import accumulate, pairwise, product
from math import ceil, inf

import numpy as np

from planner.cost.in_flight import no_split_fits
from planner.cost.layers import mean_compute_s, running_sums
from planner.cost.network import nominal_path
from planner.plan.microbatches import even_cut, even_microbatches
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.step.graph import Floats, Ints
from planner.systems.asteroid.stage_costs import levelled
from planner.systems.asteroid.strategy import HybridRules, hybrid_pipeline, hybrid_plan, plain_depth


def dapple(scenario: Scenario) -> Plan:
    """Return DAPPLE's plan: one pipeline of groups, planned as if every device had the mean speed.

    Raises:
        InputError: No split fits into memory.
    """
    return hybrid_plan(levelled(scenario), scenario.cluster.devices, "dapple", HybridRules(depth=plain_depth))


def hetpipe(scenario: Scenario) -> Plan:
    """Return HetPipe's plan: one pipeline for each virtual worker, all about equally fast.

    Raises:
        InputError: No split fits into memory.
    """
    # A worker needs at least one sample, and at least two devices unless the cluster has only one.
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
    """Return the devices of each of ``count`` virtual workers, about equally fast in all, sorted by memory."""
    layers = len(scenario.model.layers)

    def whole_model_s(device: Device) -> float:
        return scenario.model.times(0, layers, device.kind, 1).total_s

    workers: list[list[Device]] = [[] for _ in range(count)]
    for index, device in enumerate(sorted(scenario.cluster.devices, key=whole_model_s)):
        turn, place = divmod(index, count)
        workers[place if turn % 2 == 0 else count - 1 - place].append(device)
    return [sorted(worker[:layers], key=lambda device: -device.memory_bytes) for worker in workers]


def pipedream(scenario: Scenario) -> Plan:
    """Return PipeDream's plan: one pipeline of replicated stages whose slowest stage or transfer is fastest.

    The recursion is that of Narayanan et al., SOSP 2019, section 3.1. A(j, m) is the least possible time of the slowest
    stage or transfer for layers 1 to j on m devices, of which n hold the last stage, layers k + 1 to j. T(i..j) is the
    compute time of layers i to j in both directions, W(i..j) their parameter bytes, act_k the output bytes of layer k,
    and BW the bandwidth in bytes per second::

        A(j, m) = min over k < j, n < m of max( A(k, m - n),
                                                2 * act_k / (BW * n),
                                                (T(k+1..j) + 4 (n - 1) W(k+1..j) / (BW n)) / n )

    The paper takes equal devices and one bandwidth. Assumed here: a layer's time is its mean over the devices, and BW
    is the lowest declared bandwidth between consecutive devices of the cluster. The number of microbatches in flight at
    a stage is the paper's: the number of devices of this and all later stages, divided by the stage's replicas. The
    original keeps several versions of the weights; here the pipeline is drained in every step, so that training is
    synchronous.

    The recursion ignores memory, so `check_plan` may refuse the plan.
    """
    devices = [device.name for device in scenario.cluster.devices]
    microbatches = even_microbatches(scenario, scenario.training.global_batch, len(devices))
    stages = []
    used = 0
    for first_layer, end_layer, width in _split(scenario, max(microbatches)):
        replicas = tuple(Replica(name) for name in devices[used : used + width])
        stages.append(Stage(first_layer, end_layer, replicas, in_flight=ceil((len(devices) - used) / width)))
        used += width
    # Synchronous pipelines need depths that do not increase from stage to stage, so earlier stages are raised.
    depths = list(accumulate((stage.in_flight for stage in reversed(stages)), max))[::-1]
    pipeline = Pipeline(tuple(stages), microbatches).with_depths(depths)
    return Plan(scenario.name, scenario.model.name, "pipedream", "1f1b", (pipeline,))


def _split(scenario: Scenario, samples: int) -> list[tuple[int, int, int]]:
    """Return the stages that the recursion chooses, each as (first layer, index after the last, number of devices)."""
    layers, devices = len(scenario.model.layers), len(scenario.cluster.devices)
    time_until_s = mean_compute_s(scenario, samples)
    bytes_until = running_sums(layer.parameter_bytes for layer in scenario.model.layers)
    paths = [nominal_path(scenario, a.name, b.name) for a, b in pairwise(scenario.cluster.devices)]
    bytes_per_s = min((path.rate_bps for path in paths), default=inf) / 8
    transfer_s = 2 * samples * np.array([0, *(layer.output_bytes for layer in scenario.model.layers)]) / bytes_per_s

    def stage_s(first: Ints, end: int, width: Ints) -> Floats:
        sum_s = 4 * (width - 1) * (bytes_until[end] - bytes_until[first]) / (bytes_per_s * width)
        return np.asarray((time_until_s[end] - time_until_s[first] + sum_s) / width)

    # A(end, count) in seconds, and the first layer of the last stage with its number of devices.
    best_s, last = np.zeros((layers + 1, devices + 1)), np.zeros((layers + 1, devices + 1, 2), np.int64)
    for count, end in product(range(1, devices + 1), range(1, layers + 1)):
        cuts, widths = np.arange(end)[:, None], np.arange(1, count + 1)
        # With all devices or all layers, it is the only stage.
        is_one = (cuts == 0) & (widths == count)
        before_s = np.where((cuts == 0) ^ (widths == count), inf, best_s[:end, count - widths])
        behind_s = np.where(is_one, 0.0, transfer_s[cuts] / widths)
        slowest_s = np.maximum(np.maximum(before_s, behind_s), stage_s(cuts, end, widths))
        cut, index = divmod(int(slowest_s.argmin()), count)
        best_s[end, count], last[end, count] = slowest_s[cut, index], (cut, index + 1)
    stages: list[tuple[int, int, int]] = []
    end, count = layers, devices
    while end:
        cut, width = last[end, count].tolist()
        stages.insert(0, (cut, end, width))
        end, count = cut, count - width
    return stages
