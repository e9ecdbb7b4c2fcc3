"""Cannikin at work: what it has learned from simulated steps, the plans it makes of it, and how right it is."""

from collections.abc import Sequence

from experiments.reproductions.cannikin.clusters import with_batch
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.cannikin.opt_perf import batch_time_s, opt_perf
from planner.systems.cannikin.speed_learning import SpeedLearner, SumLearner, measured_nodes, measured_sums
from planner.systems.cannikin.step_model import NO_SUMS, NodeSpeed
from planner.systems.cannikin.strategy import data_parallel_plan, even_plan, update_s
from sim.simulator import Simulator


class LearnedModel:
    """What is known of a cluster from the steps that were run on it; one object for one run.

    Args:
        scenario: What is trained; its batch may change.
        overlap: Whether it is known that sums overlap with backward; else compute is balanced, and all sums are thought
            to come after it.
    """

    def __init__(self, scenario: Scenario, *, overlap: bool = True) -> None:
        self._scenario = scenario
        self._overlap = overlap
        self._nodes = SpeedLearner()
        self._sums = SumLearner()
        self._made: dict[int, tuple[Plan, float]] = {}
        self._simulated_s: dict[Plan, float] = {}

    def predicted_s(self, batch: int) -> float:
        """Return how long a step of this batch is expected to take, seconds."""
        return self._divided(batch)[1]

    def simulated_s(self, batch: int) -> float:
        """Return how long the step takes that would be run with this batch, without learning from it, seconds."""
        return self._simulate(self._divided(batch)[0], batch)

    def run(self, batch: int, *, even: bool = False) -> float:
        """Run a step in the simulator, learn from it, and return how long it takes, seconds.

        Args:
            batch: Its samples.
            even: Whether all devices have the same, instead of what is best by what is known.
        """
        plan = even_plan(with_batch(self._scenario, batch), "cannikin") if even else self._divided(batch)[0]
        return self._simulate(plan, batch, learn=True)

    def _simulate(self, plan: Plan, batch: int, *, learn: bool = False) -> float:
        # The simulator is deterministic: a step that was run shows nothing new.
        if plan in self._simulated_s:
            return self._simulated_s[plan]
        events = list(Simulator().run(with_batch(self._scenario, batch), plan, None, 1).events)
        step_s = max(event.end_s for event in events) - min(event.start_s for event in events)
        if learn:
            self._simulated_s[plan] = step_s
            for device, times in measured_nodes(events, 0, plan).items():
                self._nodes.observe(device, times)
            self._sums.observe(measured_sums(events, 0))
            self._made.clear()
        return step_s

    def _divided(self, batch: int) -> tuple[Plan, float]:
        if batch not in self._made:
            self._made[batch] = self._divide_anew(batch)
        return self._made[batch]

    def _divide_anew(self, batch: int) -> tuple[Plan, float]:
        speeds = {name: self._nodes.speed(name) for name in self._scenario.cluster.by_name if self._nodes.knows(name)}
        lines = all(map(self._nodes.has_line, speeds))
        sums = self._sums.sums()
        # In proportion to speeds of which there is one point each: the second step.
        weighed = sums if lines and self._overlap else NO_SUMS

        def over_step(device: str, count: int) -> NodeSpeed:
            return speeds[device].over_step(count, update_s(self._scenario, device))

        def divide(samples: int, count: int, devices: Sequence[str], most: Sequence[int]) -> Sequence[int]:
            known = [over_step(device, count) for device in devices]
            return opt_perf(samples, known, weighed, most).samples

        plan = data_parallel_plan(with_batch(self._scenario, batch), "cannikin", divide, tuple(speeds))
        (pipeline,) = plan.pipelines
        (stage,) = pipeline.stages
        known = [over_step(replica.device, len(pipeline.microbatches)) for replica in stage.replicas]
        own = [replica.share for replica in stage.replicas]
        if self._overlap:
            return plan, batch_time_s(own, known, sums)
        return plan, batch_time_s(own, known, NO_SUMS) + sums.overlapped_s + sums.last_s
