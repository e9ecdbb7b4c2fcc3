"""Policy ``cannikin``: the shares of the batch follow the measured speeds of devices and times of gradient sums.

The method is that of Cannikin (arXiv 2402.05302). The policy starts from any plan of one stage and learns speeds from
the observed steps (`planner.systems.cannikin.speed_learning`). It changes to the shares of OptPerf
(`planner.systems.cannikin.opt_perf`) if these shorten the predicted step by a share of `LEAST_GAIN` or more. The global
batch never changes. Every device keeps at least one sample of each microbatch, since the policy does not change which
devices hold the model.

Assumption: an observation has only one compute time per device. The profile gives the share of this time that is
backward, and the share of backward after which the first bucket is ready.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil

from planner.adapt.observation import Observation
from planner.cost.in_flight import fitting_depths
from planner.cost.network import ConstantRatePath, nominal_path
from planner.plan.microbatches import even_cut
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.cannikin.opt_perf import batch_time_s, opt_perf
from planner.systems.cannikin.speed_learning import NodeTimes, SpeedLearner, SumLearner, samples_per_microbatch
from planner.systems.cannikin.step_model import NO_SUMS, NodeSpeed, sum_times
from planner.systems.cannikin.strategy import fitting_samples, profiled_speed, update_s

# Share of the step time that a change of plan must save, as in the paper.
LEAST_GAIN = 0.05


class CannikinPolicy:
    """The policy ``cannikin``; each run needs an object of its own."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._speeds = SpeedLearner()
        self._sums = SumLearner()
        self._paths: dict[tuple[str, str], ConstantRatePath] = {}

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan with new shares; None if they save too little or the plan has more than one stage."""
        if not _is_data_parallel(plan):
            return None
        if observation.gone:
            # The times of an interrupted step are incomplete, so nothing is learned from this observation.
            return self._divided(_without(plan, observation.gone))
        self._learn(observation)
        proposed = self._divided(plan)
        if proposed is None or proposed == plan:
            return None
        return proposed if self._predict_s(proposed) <= (1 - LEAST_GAIN) * self._predict_s(plan) else None

    def _learn(self, observation: Observation) -> None:
        if not _is_data_parallel(observation.plan):
            return
        count = len(observation.plan.pipelines[0].microbatches)
        samples = samples_per_microbatch(observation.plan)
        for device, compute_s in observation.compute_s:
            pure_s = (compute_s - update_s(self._scenario, device)) / count
            if samples.get(device, 0) > 0 and pure_s > 0:
                share = self._backward_share(device, ceil(samples[device]))
                self._speeds.observe(device, NodeTimes(samples[device], (1 - share) * pure_s, share * pure_s))
        for seen in observation.paths:
            # Only the rate of gradient sums is observed, not the latency; a plan of one stage has no other messages.
            nominal = nominal_path(self._scenario, seen.source, seen.target, observation.plan.connections)
            self._paths[seen.source, seen.target] = replace(nominal, rate_bps=seen.rate_bps, curves=())
        self._sums.observe([sum_times(observation.plan, self._scenario, partial(self._path, observation.plan))])

    def _backward_share(self, device: str, samples: int) -> float:
        scenario = self._scenario
        times = scenario.model.times(0, len(scenario.model.layers), scenario.cluster.by_name[device].kind, samples)
        # `fit_line` needs times above 0 s for forward and for backward.
        return min(0.999, max(0.001, times.backward_s / times.total_s)) if times.total_s > 0 else 0.5

    def _path(self, plan: Plan, source: str, target: str) -> ConstantRatePath:
        return self._paths.get((source, target)) or nominal_path(self._scenario, source, target, plan.connections)

    def _divided(self, plan: Plan) -> Plan | None:
        """Return the plan with the fastest shares at the learned speeds; None if no division fits into memory.

        Two numbers of microbatches are tried: the fewest that fit, and the current one. The second may balance better
        if memory limits the samples of a fast device.
        """
        (pipeline,) = plan.pipelines
        devices = [replica.device for replica in pipeline.stages[0].replicas]
        most = [fitting_samples(self._scenario, device) for device in devices]
        if not devices or not min(most):
            return None
        fewest = range(ceil(plan.global_batch / sum(most)), plan.global_batch // len(devices) + 1)
        fitting = (divided for count in fewest if (divided := self._divided_into(count, plan, most)) is not None)
        as_many = self._divided_into(len(pipeline.microbatches), plan, most)
        found = [each for each in (next(fitting, None), as_many) if each is not None]
        return min(found, key=self._predict_s, default=None)

    def _divided_into(self, count: int, plan: Plan, most: Sequence[int]) -> Plan | None:
        """Return the plan with the fastest shares of ``count`` microbatches; None if these do not fit into memory."""
        (pipeline,) = plan.pipelines
        (stage,) = pipeline.stages
        microbatches = even_cut(plan.global_batch, count)
        if min(microbatches) < len(stage.replicas) or max(microbatches) > sum(most):
            return None
        devices = [replica.device for replica in stage.replicas]
        samples = self._samples(devices, microbatches[0], count, most)
        replicas = tuple(replace(each, share=float(own)) for each, own in zip(stage.replicas, samples, strict=True))
        divided = replace(stage, replicas=replicas)
        if fitting_depths((1,), (divided,), self._scenario, microbatches) is None:
            return None
        return replace(plan, pipelines=(replace(pipeline, stages=(divided,), microbatches=microbatches),))

    def _samples(self, devices: Sequence[str], batch: int, count: int, most: Sequence[int]) -> Sequence[int]:
        speeds = [self._speed(device, count) for device in devices]
        # Gradient sums are not counted until every measured device has a line, which takes two sample counts.
        known = all(self._speeds.has_line(device) for device in devices if self._speeds.knows(device))
        return opt_perf(batch, speeds, self._sums.sums() if known else NO_SUMS, most, least=1).samples

    def _speed(self, device: str, count: int) -> NodeSpeed:
        if self._speeds.knows(device):
            speed = self._speeds.speed(device)
        else:
            speed = profiled_speed(self._scenario, device, max(1, fitting_samples(self._scenario, device)))
        return speed.over_step(count, update_s(self._scenario, device))

    def _predict_s(self, plan: Plan) -> float:
        (pipeline,) = plan.pipelines
        count = len(pipeline.microbatches)
        samples = samples_per_microbatch(plan)
        speeds = [self._speed(device, count) for device in samples]
        return batch_time_s(list(samples.values()), speeds, self._sums.sums())


def _is_data_parallel(plan: Plan) -> bool:
    """Return whether a plan is one stage whose replicas are single devices, without tensor parallelism."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    return len(stages) == 1 and all(not replica.partners for replica in stages[0].replicas)


def _without(plan: Plan, gone: Sequence[str]) -> Plan:
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    left = tuple(replica for replica in stage.replicas if replica.device not in gone)
    return replace(plan, pipelines=(replace(pipeline, stages=(replace(stage, replicas=left),)),))
