"""The policy ``depth``: microbatch count and in-flight depth follow what the links carry.

The first, thin form of DeepCEE's adapter. Per path it keeps a weighted mean of the observed time per bit, per
device one of the slow-down against the profile. Every microbatch count that divides the batch evenly, with
1F1B's own depths and with those that hide the round trips, is judged on these means. The plan changes when
the best candidate is clearly faster, or as fast with less in memory. The global batch never changes.
"""

from collections.abc import Iterator
from dataclasses import replace

from planner.check import check_plan
from planner.compression import compression_between, wire_bytes
from planner.depths import fitting_depths, latency_aware_depths, plain_depths
from planner.evaluate import step_time_s
from planner.observation import Observation
from planner.pipeline_costs import replica_times
from planner.plan import EXPLICIT, Pipeline, Plan, Stage
from planner.program import DeviceProgram, compile_plan
from planner.reschedule import SEARCHING
from planner.scenario import Scenario
from planner.schedules import HOLD_ALL
from planner.steady_path import SteadyPath, nominal_path
from traces.errors import InputError

# Weight of the newest observation: the mean follows a sudden change to within 10 % in two observations.
NEWEST_WEIGHT = 0.7

# A change must promise this much, so that jitter does not make the plan swing.
LEAST_GAIN = 0.03

# A change for the sake of memory must save this share of the samples in flight, for the same reason.
LEAST_SAVING = 0.2

# With this many a pipeline's filling and draining is 3 % of the step; more would gain little and take long to judge.
MOST_MICROBATCHES_PER_STAGE = 32

# Plans this close to the best count as equally fast; the one with the fewest samples in flight wins.
EQUALLY_FAST = 0.01


class DepthPolicy:
    """Raises and lowers in-flight depth and microbatch count; one object for one run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._paths: dict[tuple[str, str], SteadyPath] = {}
        self._slowdown: dict[str, float] = {}

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan with the best depths for the observed paths, or None if it gains too little."""
        self._learn(observation)
        predicted_s = {candidate: self._predict_s(candidate) for candidate in self._candidates(plan)}
        if not predicted_s:
            return None
        best_s = min(predicted_s.values())
        equally_fast = [each for each, time_s in predicted_s.items() if time_s <= best_s * (1 + EQUALLY_FAST)]
        chosen = min(equally_fast, key=lambda each: (_samples_in_flight(each), predicted_s[each]))
        current_s = self._predict_s(plan)
        faster = predicted_s[chosen] * (1 + LEAST_GAIN) < current_s
        lighter = _samples_in_flight(chosen) <= _samples_in_flight(plan) * (1 - LEAST_SAVING)
        return chosen if faster or (lighter and predicted_s[chosen] <= current_s) else None

    def _learn(self, observation: Observation) -> None:
        for seen in observation.paths:
            before = self._path(seen.source, seen.target)
            # Seconds per bit are averaged, not bits per second: time is what adds up.
            seconds_per_bit = _mean(1 / seen.rate_bps, 1 / before.rate_bps)
            latency_s, jitter_s = before.latency_s, before.jitter_s
            if seen.latency_s is not None:
                # What was seen has the jitter in it.
                latency_s, jitter_s = _mean(max(0.0, seen.latency_s), latency_s + jitter_s), 0.0
            self._paths[seen.source, seen.target] = SteadyPath(1 / seconds_per_bit, latency_s, jitter_s=jitter_s)
        programs = compile_plan(observation.plan, self._scenario)
        for device, compute_s in observation.compute_s:
            # The partners of a tensor-parallel group are as fast as the device that leads them.
            planned_s = _planned_s(programs[device]) if device in programs else 0.0
            if planned_s > 0:
                before_ratio = self._slowdown.get(device, compute_s / planned_s)
                self._slowdown[device] = _mean(compute_s / planned_s, before_ratio)

    def _path(self, source: str, target: str) -> SteadyPath:
        return self._paths.get((source, target)) or nominal_path(self._scenario, source, target)

    def _predict_s(self, plan: Plan) -> float:
        # A search for the best order takes longer than a decision may: its candidates are judged by the rule that
        # devices would follow without one.
        quick = replace(plan, order="dynamic") if plan.schedule in SEARCHING else plan
        return step_time_s(quick, self._scenario, self._path, self._slowdown)

    def _candidates(self, plan: Plan) -> Iterator[Plan]:
        """Plans with another microbatch count or other depths, one pipeline changed at a time."""
        for index, pipeline in enumerate(plan.pipelines) if plan.schedule != EXPLICIT else ():
            widest = max(len(stage.replicas) for stage in pipeline.stages)
            most = MOST_MICROBATCHES_PER_STAGE * len(pipeline.stages)
            for count in _even_counts(pipeline.samples, least_size=widest, most=most):
                microbatches = (pipeline.samples // count,) * count
                for depths in self._depths(plan, pipeline, microbatches):
                    candidate = plan.with_microbatches(index, microbatches, depths)
                    if len(set(pipeline.workers)) == len(pipeline.stages) or self._is_possible(candidate):
                        yield candidate

    def _is_possible(self, plan: Plan) -> bool:
        """Whether a plan can be carried out: depths that fit every stage may not fit a device that holds several."""
        try:
            check_plan(plan, self._scenario)
        except InputError:
            return False
        return True

    def _depths(self, plan: Plan, pipeline: Pipeline, microbatches: tuple[int, ...]) -> set[tuple[int, ...]]:
        """Depths worth a try that fit into memory."""
        stages = len(pipeline.stages)
        if plan.schedule in HOLD_ALL:
            wanted = {(len(microbatches),) * stages}
        else:
            wanted = {plain_depths(stages), self._hiding_depths(pipeline, microbatches, plan.compression)}
        fitted = {each: fitting_depths(each, pipeline.stages, self._scenario, microbatches) for each in wanted}
        return {
            fits
            for each, fits in fitted.items()
            if fits is not None and (fits == each or plan.schedule not in HOLD_ALL)
        }

    def _hiding_depths(self, pipeline: Pipeline, microbatches: tuple[int, ...], compression: str) -> tuple[int, ...]:
        """Depths that hide the round trips at the observed rates; a stage or boundary is as slow as its slowest."""
        samples = max(microbatches)
        compute_s = []
        for stage in pipeline.stages:
            times_s = (
                replica_times(self._scenario, stage, replica, end - first).total_s
                * self._slowdown.get(replica.device, 1.0)
                for replica, (first, end) in zip(stage.replicas, stage.intervals(samples), strict=True)
            )
            compute_s.append(max(times_s))
        boundaries = zip(pipeline.stages, pipeline.stages[1:], strict=False)
        crossings = [self._crossing_s(*both, samples, compression) for both in boundaries]
        transfer_s, latency_s = [each for each, _ in crossings], [each for _, each in crossings]
        return latency_aware_depths(compute_s, transfer_s, latency_s)

    def _crossing_s(self, senders: Stage, receivers: Stage, samples: int, compression: str) -> tuple[float, float]:
        """For how long a microbatch of so many samples keeps the slowest path busy, and the longest delay."""
        sample_bytes = self._scenario.model.layers[senders.end_layer - 1].output_bytes
        ends = ((s.device, r.device) for s in senders.replicas for r in receivers.replicas if s.device != r.device)
        transfer_s, latency_s = 0.0, 0.0
        for pair in (way for both in ends for way in (both, both[::-1])):
            form = compression_between(compression, self._scenario.cluster, *pair)
            path, size_bytes = self._path(*pair), wire_bytes(form, samples, sample_bytes)
            transfer_s = max(transfer_s, 8 * size_bytes / path.rate_bps)
            latency_s = max(latency_s, path.delay_s(size_bytes))
        return transfer_s, latency_s


def _planned_s(program: DeviceProgram) -> float:
    return program.update_s + sum(work.duration_s for work in program.work)


def _mean(newest: float, before: float) -> float:
    return NEWEST_WEIGHT * newest + (1 - NEWEST_WEIGHT) * before


def _even_counts(samples: int, least_size: int, most: int) -> list[int]:
    """Numbers of equal microbatches, ``most`` at most, with ``least_size`` samples or more in each."""
    return [count for count in range(1, min(most, samples // least_size) + 1) if samples % count == 0]


def _samples_in_flight(plan: Plan) -> int:
    return sum(stage.in_flight * max(pipeline.microbatches) for pipeline in plan.pipelines for stage in pipeline.stages)
