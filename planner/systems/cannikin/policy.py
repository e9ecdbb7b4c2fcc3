"""Policy ``cannikin``, and its rivals for reproductions: shares, and the global batch, follow what is observed.

The method is that of Cannikin (arXiv 2402.05302). The policy starts from any plan of one stage and learns speeds from
the observed steps (`planner.systems.cannikin.speed_learning`). It changes to the shares of OptPerf
(`planner.systems.cannikin.opt_perf`) if these shorten the predicted step by a share of `LEAST_GAIN` or more. Every
device keeps at least one sample of each microbatch, since the policy does not change which devices hold the model.

Where the scenario has limits for the batch, and the gradient noise is observed, the policy also chooses the batch, with
the shares of OptPerf for it, by goodput (`planner.systems.cannikin.goodput`). The plan keeps the noise scale, by which
the learning rate may follow the batch.

Assumptions: an observation has only one compute time per device; the profile gives the share of this time that is
backward, and the share of backward after which the first bucket is ready. The batch is chosen anew after every
`CHOICE_STEPS` steps (the paper: every epoch), from a noise scale that is averaged over some hundred steps. If a device
was measured with one number of samples only, its time cannot be predicted for others: the policy then tries the next
larger batch that changes every such number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, inf

from planner.adapt.gradient_noise import SmoothedNoise
from planner.adapt.observation import Observation
from planner.cost.in_flight import fitting_depths
from planner.cost.network import ConstantRatePath, nominal_path
from planner.plan.microbatches import even_cut
from planner.plan.plan import EXPLICIT, Plan
from planner.scenario.scenario import Scenario
from planner.scenario.training import rate_factor
from planner.schedules import HOLD_ALL
from planner.step.orders import with_schedule
from planner.systems.cannikin.goodput import candidate_batches, choose_batch
from planner.systems.cannikin.opt_perf import batch_time_s, opt_perf
from planner.systems.cannikin.speed_learning import NodeTimes, SpeedLearner, SumLearner, samples_per_microbatch
from planner.systems.cannikin.step_model import NO_SUMS, NodeSpeed, sum_times
from planner.systems.cannikin.strategy import fitting_samples, profiled_speed, update_s

# Share of the step time that a change of plan must save, as in the paper.
LEAST_GAIN = 0.05

# Number of observed steps from one choice of the batch to the next, and so also before the first one.
CHOICE_STEPS = 10

# Factor by which a step multiplies the weight of earlier ones in the average of the noise: that of a single step is far
# from the truth if the batch is small against the noise scale.
_NOISE_DECAY = 0.99


class CannikinPolicy:
    """The policy ``cannikin``; each run needs an object of its own."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._speeds = SpeedLearner()
        self._sums = SumLearner()
        self._paths: dict[tuple[str, str], ConstantRatePath] = {}
        self._limits = scenario.training.batch
        self._noise = SmoothedNoise(_NOISE_DECAY)
        self._steps_to_choice = CHOICE_STEPS

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan with new shares or another batch; None if it gains too little or has more than one stage."""
        if not _is_data_parallel(plan):
            return None
        if observation.gone:
            # The times of an interrupted step are incomplete, so nothing is learned from this observation.
            return self._divided(_without(plan, observation.gone), plan.global_batch)
        self._learn(observation)
        # While a plan that was decided on is not observed yet, nothing more is known about batches.
        if observation.plan == plan and (noise_scale := self._noise_scale()) is not None and self._is_due():
            chosen = self._chosen(plan, noise_scale)
            if chosen is not None:
                return chosen
        proposed = self._divided(plan, plan.global_batch)
        return proposed if self._is_better(proposed, plan) else None

    def _is_better(self, proposed: Plan | None, plan: Plan) -> bool:
        """Return whether other shares of the same batch save enough of the step's time."""
        if proposed is None or proposed == plan:
            return False
        return self._predict_s(proposed) <= (1 - LEAST_GAIN) * self._predict_s(plan)

    def _noise_scale(self) -> float | None:
        """Return the average noise scale, samples; None if it is unknown, or noise hides the gradient."""
        estimate = self._noise.estimate
        if estimate is None or estimate.squared_gradient <= 0 or estimate.variance <= 0:
            return None
        return estimate.noise_scale

    def _is_due(self) -> bool:
        self._steps_to_choice -= 1
        if self._steps_to_choice > 0:
            return False
        self._steps_to_choice = CHOICE_STEPS
        return True

    def _chosen(self, plan: Plan, noise_scale: float) -> Plan | None:
        """Return the plan with the batch of the highest goodput and its fastest shares; None if the batch stays."""
        if self._limits is None:
            return None
        first_batch = self._scenario.training.global_batch
        batches = candidate_batches(self._limits.smallest, self._limits.largest)
        divided = {batch: self._divided(plan, batch) for batch in {*batches, plan.global_batch}}
        times_s = {batch: inf if each is None else self._predict_s(each) for batch, each in divided.items()}
        if not all(self._speeds.has_line(device) for device in plan.devices):
            batch = self._telling_batch(plan, divided)
        else:
            batch = choose_batch(plan.global_batch, batches, times_s.__getitem__, first_batch, noise_scale)
        chosen = divided[batch]
        if batch != plan.global_batch and chosen is not None:
            return replace(chosen, noise_scale=noise_scale)
        # The batch stays, and with it the learning rate, unless the noise has changed.
        before, after = (
            rate_factor(self._limits.rate_rule, plan.global_batch, first_batch, each)
            for each in (plan.noise_scale, noise_scale)
        )
        return replace(plan, noise_scale=noise_scale) if abs(after / before - 1) > LEAST_GAIN else None

    def _telling_batch(self, plan: Plan, divided: Mapping[int, Plan | None]) -> int:
        """Return the next larger batch in which all devices that have no line take other numbers of samples than now.

        It is the current batch if the shares will change without it, or if there is none.
        """
        if self._is_better(divided[plan.global_batch], plan):
            return plan.global_batch
        now = samples_per_microbatch(plan)
        for batch in sorted(each for each in divided if each > plan.global_batch):
            other = divided[batch]
            samples = {} if other is None else samples_per_microbatch(other)
            if all(samples.get(each) != now[each] for each in now if not self._speeds.has_line(each)):
                return batch
        return plan.global_batch

    def _learn(self, observation: Observation) -> None:
        if not _is_data_parallel(observation.plan):
            return
        if observation.noise is not None:
            self._noise = self._noise.update(observation.noise)
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

    def _divided(self, plan: Plan, batch: int) -> Plan | None:
        """Return the plan with a global batch and its fastest shares; None if no division fits into memory.

        Two numbers of microbatches are tried: the fewest that fit, and the current one. The second may balance better
        if memory limits the samples of a fast device.
        """
        (pipeline,) = plan.pipelines
        devices = [replica.device for replica in pipeline.stages[0].replicas]
        most = [fitting_samples(self._scenario, device) for device in devices]
        if not devices or not min(most):
            return None
        fewest = range(ceil(batch / sum(most)), batch // len(devices) + 1)
        fitting = (each for count in fewest if (each := self._divided_into(count, plan, batch, most)) is not None)
        as_many = self._divided_into(len(pipeline.microbatches), plan, batch, most)
        found = [each for each in (next(fitting, None), as_many) if each is not None]
        return min(found, key=self._predict_s, default=None)

    def _divided_into(self, count: int, plan: Plan, batch: int, most: Sequence[int]) -> Plan | None:
        """Return the plan with the fastest shares of ``count`` microbatches; None if these do not fit into memory."""
        (pipeline,) = plan.pipelines
        (stage,) = pipeline.stages
        if count > batch:
            return None
        microbatches = even_cut(batch, count)
        if min(microbatches) < len(stage.replicas) or max(microbatches) > sum(most):
            return None
        devices = [replica.device for replica in stage.replicas]
        samples = self._samples(devices, microbatches[0], count, most)
        replicas = tuple(replace(each, share=float(own)) for each, own in zip(stage.replicas, samples, strict=True))
        divided = replace(stage, replicas=replicas, in_flight=1)
        if fitting_depths((1,), (divided,), self._scenario, microbatches) is None:
            return None
        found = replace(plan, pipelines=(replace(pipeline, stages=(divided,), microbatches=microbatches),))
        # Orders fit the old microbatches only, and gpipe would hold all of them.
        is_kept = plan.schedule != EXPLICIT and plan.schedule not in HOLD_ALL
        return found if is_kept else with_schedule(found, self._scenario, "1f1b")

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


class AdaptdlPolicy(CannikinPolicy):
    """AdaptDL (Pollux, OSDI'21) at run time: the batch of the highest goodput, with equal shares of all devices."""

    def _samples(self, devices: Sequence[str], batch: int, count: int, most: Sequence[int]) -> Sequence[int]:
        return even_cut(batch, len(devices))


class LbBspPolicy(CannikinPolicy):
    """LB-BSP at run time: shares with which all devices compute for the same time, and always the same batch."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._limits = None

    def _samples(self, devices: Sequence[str], batch: int, count: int, most: Sequence[int]) -> Sequence[int]:
        speeds = [self._speed(device, count) for device in devices]
        return opt_perf(batch, speeds, NO_SUMS, most, least=1).samples


def _is_data_parallel(plan: Plan) -> bool:
    """Return whether a plan is one stage whose replicas are single devices, without tensor parallelism."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    return len(stages) == 1 and all(not replica.partners for replica in stages[0].replicas)


def _without(plan: Plan, gone: Sequence[str]) -> Plan:
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    left = tuple(replica for replica in stage.replicas if replica.device not in gone)
    return replace(plan, pipelines=(replace(pipeline, stages=(replace(stage, replicas=left),)),))
