"""How long steps take with the exchanges of outer steps, of which workers wait for some.

A worker sends a fragment to every other worker after the steps that its exchanges follow, and goes on. So many steps
later as the overlap has, it waits until the fragments of all others have arrived; with reduce-scatter, the means of
their parts, which they send when they have the others' parts of it. Neither waits for the other one otherwise: a quick
worker whose fragments are there before the slow one needs them delays nobody, and the time of an interval lies between
that of the slowest worker and the same with an exchange. The recurrence of these times is carried out for a few
intervals, in which it becomes periodic. At constant rates its steps take as long as the simulator's
(tests/planner/systems/test_time_to_loss.py).
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, permutations

import numpy as np
from numpy.typing import NDArray

from planner.cost.network import nominal_path, payload_bps
from planner.plan.outer_step import OuterStep, fragment_exchanges
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
        transmission_s: Time for which a fragment's message keeps the path from a worker to another one busy, seconds,
            [fragments, workers, workers]. Fragments that share a link are taken to be sent at the same time.
        latency_s: Time from then to its arrival, seconds, of the same shape.
        rounds: Number of messages of a fragment on each path: the second one waits for the first ones of all workers.
        traffic_price: Price of all fragments, US dollars.
    """

    transmission_s: Floats
    latency_s: Floats
    rounds: int
    traffic_price: float

    @property
    def longest_s(self) -> float:
        """Longest time from sending a fragment to the arrival of its last message, seconds."""
        return self.rounds * float(np.max(self.between_s))

    @property
    def between_s(self) -> Floats:
        """Longest time from sending a fragment's message to its arrival, seconds, [workers, workers]."""
        longest_s: Floats = (self.transmission_s + self.latency_s).max(axis=0)
        return longest_s

    def step_s(self, inner_s: Sequence[float], interval_steps: int, outer: OuterStep) -> float:
        """Return the mean time of a step, exchanges included, seconds.

        Args:
            inner_s: Time of a step of each worker without exchanges, seconds, [workers].
            interval_steps: Steps between two exchanges of a fragment.
            outer: Fragments and overlap.
        """
        each_s = np.array(inner_s)
        now_s, position = np.zeros(len(each_s)), 0
        departed_s = np.zeros_like(self.latency_s[0])
        # The steps before which workers wait for a fragment, and when it is there.
        awaited = deque[tuple[int, Floats]]()
        ends_s = []
        exchanges = fragment_exchanges(interval_steps, outer)
        for number in range(_BEFORE + _TAKEN):
            for fragment, sending_s in enumerate(self.transmission_s):
                sent = exchanges[fragment].last_step(number) + 1
                # Before the same step a worker sends first, and then waits.
                while awaited and awaited[0][0] < sent:
                    due, there_s = awaited.popleft()
                    now_s, position = np.maximum(now_s + (due - position) * each_s, there_s), due
                now_s, position = now_s + (sent - position) * each_s, sent
                ready_s = now_s
                for _ in range(self.rounds):
                    departed_s = np.maximum(ready_s[:, None], departed_s) + sending_s
                    ready_s = (departed_s + self.latency_s[fragment]).max(axis=0)
                awaited.append((sent + outer.overlap_steps, ready_s))
            ends_s.append(float(now_s.max()))
        return (ends_s[-1] - ends_s[-1 - _TAKEN]) / (_TAKEN * interval_steps)


class ExchangePaths:
    """The paths of the messages between the pipelines of a plan, which all settings of outer steps have in common.

    Each layer goes from the first replica of the stage that has it to that of every other pipeline, without
    tensor-parallel groups; layers with equal ends go in one message. Links have their declared rates.
    """

    def __init__(self, plan: Plan, scenario: Scenario) -> None:
        self._parameters = [layer.parameter_bytes // FLOAT32_BYTES for layer in scenario.model.layers]
        holders = [_holders(pipeline) for pipeline in plan.pipelines]
        self._workers = len(holders)
        # The ends of each layer's message are made twice, since those of all workers are too many to keep.
        pairs = list(permutations(holders, 2))
        ends = dict.fromkeys(chain.from_iterable(zip(*each, strict=True) for each in pairs))
        numbers = {pair: number for number, pair in enumerate(ends)}
        message = (numbers[pair] for each in pairs for pair in zip(*each, strict=True))
        self._message = np.fromiter(message, np.int64).reshape(-1, len(self._parameters))
        self._ends = list(numbers)
        # A device belongs to one worker.
        worker = {device: number for number, devices in enumerate(holders) for device in devices}
        self._pair = np.array([[worker[end] for end in pair] for pair in numbers], np.int64).reshape(-1, 2)
        self._paths = [nominal_path(scenario, *pair, plan.connections) for pair in numbers]
        routes = [scenario.cluster.path(*pair) for pair in numbers]
        self._prices = np.array([sum(link.price_per_gb for link in route) / 1e9 for route in routes])
        # The links of each message, one after the other; the message of each of them; seconds of a byte on each link.
        links = {link.name: link for link in chain.from_iterable(routes)}
        places = {name: place for place, name in enumerate(links)}
        self._link_of = np.array([places[link.name] for route in routes for link in route], np.int64)
        self._message_of = np.repeat(np.arange(len(routes)), [len(route) for route in routes])
        network = scenario.effects.network
        self._seconds = np.array([8 / payload_bps(network, link.bandwidth_bps) for link in links.values()])

    def times(self, outer: OuterStep) -> ExchangeTimes:
        """Return the times of the exchanges by the settings of ``outer``."""
        rounds = 2 if outer.parts(self._workers) > 1 else 1
        shape = (outer.fragments, self._workers, self._workers)
        transmission_s, latency_s, price = np.zeros(shape), np.zeros(shape), 0.0
        for fragment, (sent, size_bytes, busy_s) in enumerate(self._messages(outer)):
            ends = (fragment, *self._pair[sent].T)
            np.maximum.at(transmission_s, ends, busy_s)
            np.maximum.at(latency_s, ends, self._propagation_s(sent, size_bytes))
            price += rounds * float(size_bytes @ self._prices[sent])
        return ExchangeTimes(transmission_s, latency_s, rounds, price)

    def expected(self, outer: OuterStep) -> dict[tuple[str, str], tuple[float, float]]:
        """Return the busy time of a path for a byte of the exchanges, and the latency of a message, seconds.

        The settings are those of ``outer``; the latency is the longest one of all fragments.
        """
        count = len(self._ends)
        busy_s, size_bytes, latency_s = np.zeros(count), np.zeros(count), np.zeros(count)
        for sent, own_bytes, own_s in self._messages(outer):
            busy_s[sent] += own_s
            size_bytes[sent] += own_bytes
            latency_s[sent] = np.maximum(latency_s[sent], self._propagation_s(sent, own_bytes))
        used = np.flatnonzero(size_bytes).tolist()
        return {self._ends[at]: (busy_s[at] / size_bytes[at], latency_s[at]) for at in used}

    def factors(self, slowness: Mapping[tuple[str, str], float]) -> Floats:
        """Return the largest factor of the paths from a worker to another one, [workers, workers]; 1 where none is.

        ``slowness`` is the factor on the busy time of a path between two devices.
        """
        largest = np.zeros((self._workers, self._workers))
        np.maximum.at(largest, tuple(self._pair.T), [slowness.get(ends, 0.0) for ends in self._ends])
        return np.where(largest > 0, largest, 1.0)

    def _messages(self, outer: OuterStep) -> Iterator[tuple[NDArray[np.intp], Floats, Floats]]:
        """Yield, for each fragment, the numbers of its messages, and the bytes and busy seconds of each of them."""
        parts = outer.parts(self._workers)
        # The last part of a layer is the largest one.
        sizes = np.array([outer.part_bytes(count, parts - 1, parts) for count in self._parameters], np.float64)
        for runs in outer.fragment_runs(len(sizes)):
            layers = [layer for first, end in runs for layer in range(first, end)]
            each_bytes = np.tile(sizes[layers], len(self._message))
            size_bytes = np.bincount(self._message[:, layers].reshape(-1), each_bytes, len(self._pair))
            sent = np.flatnonzero(size_bytes)
            on_links_s = size_bytes[self._message_of] * self._seconds[self._link_of]
            load_s = np.bincount(self._link_of, on_links_s, len(self._seconds))
            busy_s = np.array([self._paths[at].transmission_s(size_bytes[at]) for at in sent.tolist()])
            longest_s = np.zeros(len(self._pair))
            np.maximum.at(longest_s, self._message_of, load_s[self._link_of])
            yield sent, size_bytes[sent].astype(np.float64), np.maximum(busy_s, longest_s[sent])

    def _propagation_s(self, sent: NDArray[np.intp], size_bytes: Floats) -> list[float]:
        paths = (self._paths[at] for at in sent.tolist())
        return [path.propagation_s(size) for path, size in zip(paths, size_bytes.tolist(), strict=True)]


def _holders(pipeline: Pipeline) -> list[str]:
    """Return the device that sends and receives each layer."""
    return [stage.replicas[0].device for stage in pipeline.stages for _ in stage.layers]
