"""How long steps take with the exchanges of outer steps, of which workers wait for some.

A worker sends a fragment to every other worker after the steps that its exchanges follow, and goes on. So many steps
later as the overlap has, it waits until the fragments of all others have arrived. Neither waits for the other one
otherwise: a quick worker whose fragments are there before the slow one needs them delays nobody, and the time of an
interval lies between that of the slowest worker and the same with an exchange. The recurrence of these times is carried
out for a few intervals, in which it becomes periodic. At constant rates its steps take as long as the simulator's
(tests/planner/systems/test_time_to_loss.py).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.network import nominal_path, payload_bps
from planner.plan.outer_step import FragmentExchanges, OuterStep
from planner.plan.plan import Pipeline, Plan
from planner.scenario.convergence import Floats
from planner.scenario.scenario import Scenario
from planner.scenario.training import FLOAT32_BYTES

# Intervals before the time of a step is taken, and in which it is taken.
_BEFORE, _TAKEN = 6, 6


@dataclass(frozen=True, eq=False, slots=True)
class ExchangeTimes:
    """What the exchanges of an interval take.

    Attributes:
        transmission_s: Time for which a fragment keeps the path from a worker to another one busy, seconds,
            [fragments, workers, workers]. Fragments that share a link are taken to be sent at the same time.
        latency_s: Time from then to its arrival, seconds, of the same shape.
        traffic_price: Price of all fragments, US dollars.
    """

    transmission_s: Floats
    latency_s: Floats
    traffic_price: float

    @property
    def longest_s(self) -> float:
        """Longest time from sending a fragment to its arrival, seconds."""
        return float(np.max(self.transmission_s + self.latency_s))

    def step_s(self, inner_s: Sequence[float], interval_steps: int, outer: OuterStep) -> float:
        """Return the mean time of a step, exchanges included, seconds.

        Args:
            inner_s: Time of a step of each worker without exchanges, seconds, [workers].
            interval_steps: Steps between two exchanges of a fragment.
            outer: Fragments and overlap; this is at most the number of steps between two fragments.
        """
        each_s = np.array(inner_s)
        now_s, position = np.zeros(len(each_s)), 0
        departed_s = np.zeros_like(self.latency_s[0])
        ends_s = []
        for number in range(_BEFORE + _TAKEN):
            for fragment, sending_s in enumerate(self.transmission_s):
                sent = FragmentExchanges.of(interval_steps, outer, fragment).first_after + number * interval_steps
                now_s = now_s + (sent - position) * each_s
                departed_s = np.maximum(now_s[:, None], departed_s) + sending_s
                arrived_s = (departed_s + self.latency_s[fragment]).max(axis=0)
                now_s = np.maximum(now_s + outer.overlap_steps * each_s, arrived_s)
                position = sent + outer.overlap_steps
            ends_s.append(float(now_s.max()))
        return (ends_s[-1] - ends_s[-1 - _TAKEN]) / (_TAKEN * interval_steps)


def exchange_times(plan: Plan, scenario: Scenario, outer: OuterStep) -> ExchangeTimes:
    """Return the times of the exchanges between the pipelines of a plan, by the settings of ``outer``.

    Each layer goes from the first replica of the stage that has it to that of every other pipeline, without
    tensor-parallel groups. Links have their declared rates.
    """
    holders = [_holders(pipeline) for pipeline in plan.pipelines]
    sizes = [outer.packed_bytes(layer.parameter_bytes // FLOAT32_BYTES) for layer in scenario.model.layers]
    shape = (outer.fragments, len(holders), len(holders))
    transmission_s, latency_s, price = np.zeros(shape), np.zeros(shape), 0.0
    for fragment, runs in enumerate(outer.fragment_runs(len(sizes))):
        layers = [layer for first, end in runs for layer in range(first, end) if sizes[layer]]
        sent: defaultdict[tuple[int, int], defaultdict[tuple[str, str], int]] = defaultdict(lambda: defaultdict(int))
        load_s: defaultdict[str, float] = defaultdict(float)
        for one, source in enumerate(holders):
            for other, target in enumerate(holders):
                for layer in layers if one != other else ():
                    sent[one, other][source[layer], target[layer]] += sizes[layer]
        for messages in sent.values():
            for ends, size_bytes in messages.items():
                for link in scenario.cluster.path(*ends):
                    load_s[link.name] += 8 * size_bytes / payload_bps(scenario.effects.network, link.bandwidth_bps)
                    price += size_bytes / 1e9 * link.price_per_gb
        for pair, messages in sent.items():
            for ends, size_bytes in messages.items():
                path = nominal_path(scenario, *ends, plan.connections)
                loads_s = [load_s[link.name] for link in scenario.cluster.path(*ends)]
                place = (fragment, *pair)
                transmission_s[place] = max(transmission_s[place], path.transmission_s(size_bytes), *loads_s)
                latency_s[place] = max(latency_s[place], path.propagation_s(size_bytes))
    return ExchangeTimes(transmission_s, latency_s, price)


def _holders(pipeline: Pipeline) -> list[str]:
    """Return the device that sends and receives each layer."""
    return [stage.replicas[0].device for stage in pipeline.stages for _ in stage.layers]
