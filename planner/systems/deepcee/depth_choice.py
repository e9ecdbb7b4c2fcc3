"""The choice of microbatch count and depths (``in_flight``) with the shortest step on observed paths and devices.

Candidates are all microbatch counts that divide the batch evenly, each with 1F1B's depths and with depths that hide
round trips; depths that do not fit into memory are reduced. The step of each candidate is predicted at the observed
rates. Layers stay on their devices, and the global batch never changes.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from planner.check import is_possible
from planner.cost.in_flight import fitting_depths, latency_aware_depths, plain_depths
from planner.cost.layers import with_launches
from planner.cost.network import message_bytes
from planner.cost.stage import stage_times
from planner.plan.plan import EXPLICIT, Pipeline, Plan, Stage
from planner.scenario.scenario import Scenario
from planner.schedules import HOLD_ALL
from planner.step.evaluate import step_time_s
from planner.step.orders import SEARCHING
from planner.systems.deepcee.observed_paths import ObservedPaths

# Least share of the step time that a change must save. It must also save `NOISE_FACTOR` times the noise of the
# observations: the median change of the predicted step time over the last `NOISE_STEPS` steps. As a median it follows
# links that vary in every step, but not a single fall or rise, which the policy is to answer.
# In the first steps, when the noise is unknown, a change must save `LEAST_FIRST_GAIN`.
LEAST_GAIN = 0.03
LEAST_FIRST_GAIN = 0.1
NOISE_FACTOR = 2.0
NOISE_STEPS = 8

# Share of the samples in flight by which a change that is made to save memory must lower them.
LEAST_SAVING = 0.2

# Most microbatches per stage. With 32, the fill and drain of the pipeline take 3 % of a step: more would gain little.
MOST_MICROBATCHES_PER_STAGE = 32

# Share of the step time up to which plans count as equally fast; of these, the one with fewest samples in flight is
# used.
EQUALLY_FAST = 0.01


class DepthChoice:
    """Chooses depths and microbatch counts for one run.

    Args:
        scenario: Scenario of the run.
        seen: Observed paths and slow-downs, which the caller keeps up to date.
    """

    def __init__(self, scenario: Scenario, seen: ObservedPaths) -> None:
        self._scenario = scenario
        self._seen = seen
        self._before: tuple[Plan, float] | None = None
        self._changes: deque[float] = deque(maxlen=NOISE_STEPS)

    @property
    def least_gain(self) -> float:
        """Share of the step time that a change must save, which follows the noise of the observations."""
        if len(self._changes) <= 2:
            return LEAST_FIRST_GAIN
        return max(LEAST_GAIN, NOISE_FACTOR * median(self._changes))

    def learn_noise(self, plan: Plan) -> None:
        """Note how much the predicted step time of ``plan`` has changed by the newest observation."""
        now_s = self.predict_s(plan)
        if self._before is not None and self._before[0] == plan:
            self._changes.append(abs(now_s / self._before[1] - 1))
        self._before = plan, now_s

    def choose(self, plan: Plan) -> Plan | None:
        """Return the candidate with the shortest predicted step, or None if it is not better than ``plan``."""
        predicted_s = {candidate: self.predict_s(candidate) for candidate in self._candidates(plan)}
        if not predicted_s:
            return None
        best_s = min(predicted_s.values())
        equally_fast = [each for each, time_s in predicted_s.items() if time_s <= best_s * (1 + EQUALLY_FAST)]
        chosen = min(equally_fast, key=lambda each: (_samples_in_flight(each), predicted_s[each]))
        return chosen if self.is_better(chosen, plan) else None

    def is_better(self, candidate: Plan, plan: Plan) -> bool:
        """Return whether ``candidate`` is clearly faster than ``plan``, or as fast with clearly less in flight."""
        lighter = _samples_in_flight(candidate) <= _samples_in_flight(plan) * (1 - LEAST_SAVING)
        return self.is_faster(candidate, plan) or (lighter and self.predict_s(candidate) <= self.predict_s(plan))

    def is_faster(self, candidate: Plan, plan: Plan) -> bool:
        """Return whether ``candidate`` is predicted to be faster than ``plan`` by more than `least_gain`."""
        return self.predict_s(candidate) * (1 + self.least_gain) < self.predict_s(plan)

    def is_bound_by_links(self, plan: Plan) -> bool:
        """Return whether a link limits some pipeline: a transfer of a microbatch takes longer than any stage."""
        for pipeline in plan.pipelines:
            compute_s, transfer_s, _ = self._times_s(pipeline, max(pipeline.microbatches), plan.compression)
            if max(transfer_s, default=0.0) > max(compute_s):
                return True
        return False

    def predict_s(self, plan: Plan) -> float:
        """Return the predicted time of a plan's step on the observed paths and devices, seconds."""
        # Some schedules search for an order of actions, which takes too long here: predict these with a dynamic order.
        quick = replace(plan, order="dynamic") if plan.schedule in SEARCHING else plan
        return step_time_s(quick, self._scenario, self._seen.path, self._seen.slowdown)

    def _candidates(self, plan: Plan) -> Iterator[Plan]:
        """Yield plans that differ from ``plan`` in the microbatch count or the depths of one pipeline."""
        for index, pipeline in enumerate(plan.pipelines) if plan.schedule != EXPLICIT else ():
            widest = max(len(stage.replicas) for stage in pipeline.stages)
            most = MOST_MICROBATCHES_PER_STAGE * len(pipeline.stages)
            counts = range(1, min(most, pipeline.samples // widest) + 1)
            for count in (each for each in counts if pipeline.samples % each == 0):
                microbatches = (pipeline.samples // count,) * count
                for depths in self._depths(plan, pipeline, microbatches):
                    candidate = plan.with_microbatches(index, microbatches, depths)
                    if len(set(pipeline.workers)) == len(pipeline.stages) or is_possible(candidate, self._scenario):
                        yield candidate

    def _depths(self, plan: Plan, pipeline: Pipeline, microbatches: tuple[int, ...]) -> set[tuple[int, ...]]:
        """Return the candidates for the depths of all stages, reduced to what fits into memory."""
        stages = len(pipeline.stages)
        if plan.schedule in HOLD_ALL:
            wanted = {(len(microbatches),) * stages}
        else:
            times_s = self._times_s(pipeline, max(microbatches), plan.compression)
            wanted = {plain_depths(stages), latency_aware_depths(*times_s)}
        fitted = {each: fitting_depths(each, pipeline.stages, self._scenario, microbatches) for each in wanted}
        return {
            fits
            for each, fits in fitted.items()
            if fits is not None and (fits == each or plan.schedule not in HOLD_ALL)
        }

    def _times_s(
        self, pipeline: Pipeline, samples: int, compression: str
    ) -> tuple[list[float], list[float], list[float]]:
        """Return the compute time of each stage, and the transmission time and latency of each boundary, seconds.

        All times are those of one microbatch of ``samples`` samples.
        """
        compute_s = []
        for index, stage in enumerate(pipeline.stages):
            times_s = (
                with_launches(
                    stage_times(self._scenario, pipeline, index, replica, end - first), self._scenario
                ).total_s
                * self._seen.slowdown.get(replica.device, 1.0)
                for replica, (first, end) in zip(stage.replicas, stage.intervals(samples), strict=True)
            )
            compute_s.append(max(times_s))
        boundaries = zip(pipeline.stages, pipeline.stages[1:], strict=False)
        transfers = [self._boundary_s(*both, samples, compression) for both in boundaries]
        return compute_s, [each for each, _ in transfers], [each for _, each in transfers]

    def _boundary_s(self, senders: Stage, receivers: Stage, samples: int, compression: str) -> tuple[float, float]:
        """Return the longest transmission time and the longest latency of any path between two stages, seconds."""
        sample_bytes = self._scenario.model.layers[senders.end_layer - 1].output_bytes
        ends = ((s.device, r.device) for s in senders.replicas for r in receivers.replicas if s.device != r.device)
        transfer_s, latency_s = 0.0, 0.0
        for pair in (each for both in ends for each in (both, both[::-1])):
            path = self._seen.path(*pair)
            size_bytes = message_bytes(self._scenario, compression, *pair, samples, sample_bytes)
            transfer_s = max(transfer_s, path.transmission_s(size_bytes))
            latency_s = max(latency_s, path.propagation_s(size_bytes))
        return transfer_s, latency_s


def _samples_in_flight(plan: Plan) -> int:
    return sum(stage.in_flight * max(pipeline.microbatches) for pipeline in plan.pipelines for stage in pipeline.stages)
