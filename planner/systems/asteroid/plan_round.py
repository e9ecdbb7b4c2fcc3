"""The steps of a pipeline's round, for the closed form of `round_latency`: whatever strategy made the plan."""

from planner.cost.stage import replica_times
from planner.cost.steady_path import nominal_path
from planner.plan.plan import Pipeline, Stage
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.round_latency import RoundStep


def round_steps(pipeline: Pipeline, scenario: Scenario) -> tuple[RoundStep, ...]:
    """Return execution and communication steps in turn, for the pipeline's largest microbatch.

    As the paper counts them [second-hand]: a group is as slow as its slowest replica, a transfer takes all of a
    microbatch over the slowest path between two groups, and gradients are summed in a ring.
    """
    samples = max(pipeline.microbatches)
    steps: list[RoundStep] = []
    for index, stage in enumerate(pipeline.stages):
        if index:
            steps.append(_transfer(pipeline.stages[index - 1], stage, scenario, samples))
        steps.append(_execution(stage, scenario, samples))
    return tuple(steps)


def _execution(stage: Stage, scenario: Scenario, samples: int) -> RoundStep:
    times = [
        replica_times(scenario, stage, replica, end - first)
        for replica, (first, end) in zip(stage.replicas, stage.intervals(samples), strict=True)
    ]
    devices = [replica.device for replica in stage.replicas]
    sync_s = 0.0
    if len(devices) > 1:
        bits = 8 * scenario.model.parameter_bytes(stage.first_layer, stage.end_layer)
        sync_s = 2 * (len(devices) - 1) / len(devices) * bits / _least_rate_bps(devices, devices, scenario)
    return RoundStep(max(each.forward_s for each in times), max(each.backward_s for each in times), sync_s)


def _transfer(senders: Stage, receivers: Stage, scenario: Scenario, samples: int) -> RoundStep:
    bits = 8 * samples * scenario.model.layers[receivers.first_layer - 1].output_bytes
    ends = [[replica.device for replica in stage.replicas] for stage in (senders, receivers)]
    time_s = bits / _least_rate_bps(ends[0], ends[1], scenario)
    return RoundStep(time_s, time_s, is_transfer=True)


def _least_rate_bps(senders: list[str], receivers: list[str], scenario: Scenario) -> float:
    return min(nominal_path(scenario, a, b).rate_bps for a in senders for b in receivers if a != b)
