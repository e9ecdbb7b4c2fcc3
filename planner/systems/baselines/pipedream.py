"""PipeDream (Narayanan et al., SOSP 2019): one pipeline of replicated stages, the slowest as fast as possible.

With T(i..j) the compute time of layers i to j, W their parameter bytes, act_k the output bytes of layer k and BW
the bandwidth, the best slowest time for the first j layers on m devices is::

    A(j, m) = min over k < j, n < m of max( A(k, m - n),
                                            2 * act_k / (BW * n),
                                            (T(k+1..j) + 4 (n - 1) W(k+1..j) / (BW n)) / n )

It assumes equal devices and one bandwidth; here (assumed) a layer's time is its mean over the devices, and BW is
the narrowest declared link between devices that follow each other in the cluster. Depths are the paper's: as many
microbatches as devices follow for each replica. Weights are not stashed: the pipeline is flushed every step, so
that the update rule is that of synchronous training.
"""

from functools import cache
from itertools import accumulate, pairwise
from math import ceil, inf

from planner.cost.layers import mean_compute_s
from planner.cost.network import nominal_path
from planner.plan.microbatches import even_microbatches
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario


def pipedream(scenario: Scenario) -> Plan:
    """Return one pipeline, split by PipeDream's recurrence. It ignores memory: `check_plan` may refuse the plan."""
    devices = [device.name for device in scenario.cluster.devices]
    microbatches = even_microbatches(scenario, scenario.training.global_batch, len(devices))
    stages = []
    used = 0
    for first_layer, end_layer, width in _split(scenario, max(microbatches)):
        replicas = tuple(Replica(name) for name in devices[used : used + width])
        stages.append(Stage(first_layer, end_layer, replicas, in_flight=ceil((len(devices) - used) / width)))
        used += width
    return Plan(
        scenario.name,
        scenario.model.name,
        "pipedream",
        "1f1b",
        (Pipeline(_with_falling_depths(stages), microbatches),),
    )


def _with_falling_depths(stages: list[Stage]) -> tuple[Stage, ...]:
    """Raise each depth to that of the next stage, as a synchronous flush needs, if not an asynchronous pipeline."""
    depths = list(accumulate((stage.in_flight for stage in reversed(stages)), max))[::-1]
    return tuple(
        Stage(stage.first_layer, stage.end_layer, stage.replicas, depth)
        for stage, depth in zip(stages, depths, strict=True)
    )


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
