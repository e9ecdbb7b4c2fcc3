"""Closed form of the time of one training step of a pipeline, called a round (Asteroid, arXiv 2408.08015).

The formulas follow other publications that describe the paper, since its own text was not available.

A round trains on M microbatches. A pipeline of P stages has 2P - 1 *steps*, numbered s = 0..2P-2: the execution of the
first stage, the communication to the second stage, the execution of the second stage, and so on. For each step, E_f and
E_b are the seconds of forward and of backward for one microbatch, E = E_f + E_b, and T_a is the time of the gradient
sum over the stage's devices (0 for communication). An upper index is the number of a step::

    dm = argmax over c of ( M E^c + sum of E^i over i < c )                                    dominant step
    T_w^s = sum of E_f^i over i < s                                                            waiting
    T_e^s = M E^dm + sum of E^i over s <= i < dm - sum of E^i over dm <= i < s                 executing
    round = max over s of ( T_w^s + T_e^s + T_a^s )

An equal form is round = V + U, with::

    V = max over c of ( M E^c + sum of E^i over i < c )
    U = max over s of ( T_a^s - sum of E_b^i over i < s )

A step with E, E_b and T_a that is added at the front changes V to max(M E, E + V) and U to max(T_a, U - E_b). Neither
decreases if V or U is larger, so a search may build pipelines from the last step to the first and drop the tails with
larger V and U (`planner.systems.asteroid.strategy`).

The published form adds up the two directions of a link, as if one transfer waited for the other. Our correction for
full-duplex links replaces M E of a communication step by (M - 1) max(E_f, E_b) + E_f + E_b: the directions overlap
except in the forward transfer of the first microbatch and the backward transfer of the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import inf

from planner.cost.network import nominal_path
from planner.cost.stage import stage_times
from planner.cost.synchronisation import group_bytes
from planner.plan.plan import Pipeline, Stage
from planner.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class RoundStep:
    """A step of a round: the execution of a stage, or the communication between two stages.

    Attributes:
        forward_s: Time of one microbatch's forward or, for communication, of the transfer of its activations, seconds.
        backward_s: Time of its backward or, for communication, of the transfer of the activations' gradient, seconds.
        sync_s: Time of the gradient sum over the stage's devices, seconds; 0 for communication.
        is_transfer: Whether the step is communication.
    """

    forward_s: float
    backward_s: float
    sync_s: float = 0.0
    is_transfer: bool = False

    @property
    def both_s(self) -> float:
        """Time of one microbatch in both directions, seconds."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class RoundTail:
    """The latency of the last steps of a round, as two terms: V and U of the module's docstring.

    Attributes:
        dominated_s: V, the time of the dominant step for all microbatches and of the steps in front of it for one, in
            seconds.
        late_sync_s: U, the additional time until the last gradient sum ends, seconds.
    """

    dominated_s: float
    late_sync_s: float

    @property
    def latency_s(self) -> float:
        """Time of a round that has only these steps, V + U, seconds."""
        return self.dominated_s + self.late_sync_s


# The end of a round, in front of which `prepend` puts the last step.
NO_STEPS = RoundTail(-inf, -inf)


def busy_s(step: RoundStep, microbatches: int, duplex: bool) -> float:
    """Return the time that one step takes for all microbatches without waiting, seconds: M E.

    Args:
        step: Execution or communication step.
        microbatches: Number of microbatches of the round, M.
        duplex: Whether to apply our correction for full-duplex links to communication steps.
    """
    if duplex and step.is_transfer:
        return (microbatches - 1) * max(step.forward_s, step.backward_s) + step.both_s
    return microbatches * step.both_s


def prepend(step: RoundStep, tail: RoundTail, microbatches: int, duplex: bool) -> RoundTail:
    """Return the latency of ``tail`` with one more step in front. The other arguments are those of `busy_s`."""
    return RoundTail(
        max(busy_s(step, microbatches, duplex), step.both_s + tail.dominated_s),
        max(step.sync_s, tail.late_sync_s - step.backward_s),
    )


def dominant_step(steps: Sequence[RoundStep], microbatches: int, duplex: bool) -> int:
    """Return the index of the step that determines the time of a round (dm; of several, the first).

    The arguments are those of `busy_s`.
    """
    before_s = accumulate((step.both_s for step in steps), initial=0.0)
    ends_s = [busy_s(step, microbatches, duplex) + start_s for step, start_s in zip(steps, before_s, strict=False)]
    return ends_s.index(max(ends_s))


def round_latency_s(steps: Sequence[RoundStep], microbatches: int, duplex: bool = False) -> float:
    """Return the time of a round, seconds, by the published formulas. See `busy_s` for the arguments."""
    dominant = dominant_step(steps, microbatches, duplex)
    longest_s = 0.0
    for index, step in enumerate(steps):
        waiting_s = sum(each.forward_s for each in steps[:index])
        executing_s = busy_s(steps[dominant], microbatches, duplex)
        executing_s += sum(each.both_s for each in steps[index:dominant])
        executing_s -= sum(each.both_s for each in steps[dominant:index])
        longest_s = max(longest_s, waiting_s + executing_s + step.sync_s)
    return longest_s


def round_steps(pipeline: Pipeline, scenario: Scenario) -> tuple[RoundStep, ...]:
    """Return the execution and communication steps of a pipeline, first to last, for its largest microbatch.

    As in the paper, a stage takes as long as its slowest replica, a transfer sends the whole microbatch over the
    slowest path between the devices of two stages, and a ring all-reduce sums gradients over the replicas.
    """
    samples = max(pipeline.microbatches)
    steps: list[RoundStep] = []
    for index, stage in enumerate(pipeline.stages):
        if index:
            ends = _devices(pipeline.stages[index - 1]), _devices(stage)
            steps.append(transfer_step(scenario, stage.first_layer, samples, *ends))
        steps.append(_execution(pipeline, index, scenario, samples))
    return tuple(steps)


def _execution(pipeline: Pipeline, index: int, scenario: Scenario, samples: int) -> RoundStep:
    stage = pipeline.stages[index]
    times = [
        stage_times(scenario, pipeline, index, replica, end - first)
        for replica, (first, end) in zip(stage.replicas, stage.intervals(samples), strict=True)
    ]
    degree = min(replica.tensor_parallel for replica in stage.replicas)
    sync_s = group_sync_s(scenario, stage.first_layer, stage.end_layer, _devices(stage), degree)
    return RoundStep(max(each.forward_s for each in times), max(each.backward_s for each in times), sync_s)


def _devices(stage: Stage) -> tuple[str, ...]:
    return tuple(replica.device for replica in stage.replicas)


@lru_cache(maxsize=4096)
def transfer_step(
    scenario: Scenario, boundary: int, samples: int, senders: tuple[str, ...], receivers: tuple[str, ...]
) -> RoundStep:
    """Return the communication step between two groups of devices; its latency is neglected, as in a LAN.

    Args:
        scenario: Scenario that gives output sizes and paths.
        boundary: Index of the first layer of the receiving stage; the output of the layer before it is sent.
        samples: Samples of the microbatch, all of which are sent over the slowest path.
        senders: Names of the devices of the stage in front.
        receivers: Names of the devices of the stage behind.
    """
    rate_bps = least_rate_bps(scenario, senders, receivers)
    time_s = 8 * samples * scenario.model.layers[boundary - 1].output_bytes / rate_bps
    return RoundStep(time_s, time_s, is_transfer=True)


def group_sync_s(
    scenario: Scenario, first_layer: int, end_layer: int, devices: tuple[str, ...], degree: int = 1
) -> float:
    """Return the time in which a ring all-reduce sums a stage's gradients over its devices, seconds.

    The stage has layers ``first_layer`` to ``end_layer`` - 1. With a single device, the time is 0. Each of the devices
    stands for a tensor-parallel group of ``degree`` devices.
    """
    if len(devices) == 1:
        return 0.0
    bits = 8 * group_bytes(scenario, first_layer, end_layer, degree)
    return 2 * (len(devices) - 1) / len(devices) * bits / least_rate_bps(scenario, devices, devices)


@lru_cache(maxsize=4096)
def least_rate_bps(scenario: Scenario, senders: tuple[str, ...], receivers: tuple[str, ...]) -> float:
    """Return the rate of the slowest path from a sender to a different receiver, bits per second; infinity for none."""
    return min((nominal_path(scenario, a, b).rate_bps for a in senders for b in receivers if a != b), default=inf)
