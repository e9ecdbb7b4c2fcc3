"""The round latency of a hybrid pipeline in closed form (Asteroid, arXiv 2408.08015) [second-hand].

A round is one training step of M microbatches. A pipeline of P stages has 2P - 1 steps s = 0..2P-2, which are the
execution of a stage and the communication to the next stage in turn. E_f and E_b are the forward and backward seconds
of one microbatch in a step, E = E_f + E_b, and T_a is the seconds of a step's gradient sum. An upper index is the index
of a step::

    dm = argmax over c of ( M E^c + sum of E^i over i < c )                                    dominant step
    T_w^s = sum of E_f^i over i < s                                                            waiting
    T_e^s = M E^dm + sum of E^i over s <= i < dm - sum of E^i over dm <= i < s                 executing
    round = max over s of ( T_w^s + T_e^s + T_a^s )

Both sums of T_e are differences of one prefix sum. So a round takes V + U, where V = max over c of (M E^c + sum of E^i
over i < c) and U = max over s of (T_a^s - sum of E_b^i over i < s). Prepending a step with E, E_b and T_a changes V to
max(M E, E + V) and U to max(T_a, U - E_b). Both are monotone in V and U, which makes an exact dynamic programme
possible.

In this formula, transfers in both directions of a link wait for each other. The correction for full duplex (ours) puts
(M - 1) max(E_f, E_b) + E_f + E_b in place of M E for communication steps: both directions transfer at once, except
during the forward transfer of the first microbatch and the backward transfer of the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.cost.network import nominal_path
from planner.cost.stage import replica_times
from planner.plan.plan import Pipeline, Stage
from planner.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class RoundStep:
    """A step of a round: the execution of a stage, or the communication between two stages.

    Attributes:
        forward_s: Forward time of one microbatch, seconds.
        backward_s: Backward time of one microbatch, seconds.
        sync_s: Time of the gradient sum at the end of the round, seconds; 0 for communication.
        is_transfer: Whether the step is communication.
    """

    forward_s: float
    backward_s: float
    sync_s: float = 0.0
    is_transfer: bool = False

    @property
    def both_s(self) -> float:
        """Forward and backward time of one microbatch, seconds."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class RoundTail:
    """The latency of the last steps of a round, as the two terms V and U of the module's docstring.

    Attributes:
        dominated_s: V, max over c of (M E^c + sum of E^i over i < c), seconds.
        late_sync_s: U, max over s of (T_a^s - sum of E_b^i over i < s), seconds.
    """

    dominated_s: float
    late_sync_s: float

    @property
    def latency_s(self) -> float:
        """Latency of a round that consists of these steps alone, seconds."""
        return self.dominated_s + self.late_sync_s


def busy_s(step: RoundStep, microbatches: int, duplex: bool) -> float:
    """Return the time that a dominant step takes for all microbatches, seconds: M E.

    Args:
        step: Execution or communication step.
        microbatches: Number of microbatches of the round, M.
        duplex: Whether to correct the published formula for links that transfer in both directions at once.
    """
    if duplex and step.is_transfer:
        return (microbatches - 1) * max(step.forward_s, step.backward_s) + step.both_s
    return microbatches * step.both_s


def prepend(step: RoundStep, tail: RoundTail | None, microbatches: int, duplex: bool) -> RoundTail:
    """Return the tail extended by a step in front; ``tail`` is None for the last step of a round.

    See `busy_s` for the other arguments.
    """
    alone_s = busy_s(step, microbatches, duplex)
    if tail is None:
        return RoundTail(alone_s, step.sync_s)
    return RoundTail(max(alone_s, step.both_s + tail.dominated_s), max(step.sync_s, tail.late_sync_s - step.backward_s))


def dominant_step(steps: Sequence[RoundStep], microbatches: int, duplex: bool) -> int:
    """Return the index dm of the dominant step, the first of several. See `busy_s` for the arguments."""
    before_s = accumulate((step.both_s for step in steps), initial=0.0)
    ends_s = [busy_s(step, microbatches, duplex) + start_s for step, start_s in zip(steps, before_s, strict=False)]
    return ends_s.index(max(ends_s))


def round_latency_s(steps: Sequence[RoundStep], microbatches: int, duplex: bool = False) -> float:
    """Return the latency of a round by the formulas for dm, T_w and T_e, seconds. See `busy_s` for the arguments."""
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
    """Return the pipeline's execution and communication steps in turn, for its largest microbatch.

    As in the paper [second-hand], a stage is as slow as its slowest replica, a transfer sends the whole microbatch over
    the slowest path between two stages' devices, and a ring of the replicas sums gradients.
    """
    samples = max(pipeline.microbatches)
    steps: list[RoundStep] = []
    for index, stage in enumerate(pipeline.stages):
        if index:
            rate_bps = least_rate_bps(scenario, _devices(pipeline.stages[index - 1]), _devices(stage))
            steps.append(transfer_step(scenario, stage.first_layer, samples, rate_bps))
        steps.append(_execution(stage, scenario, samples))
    return tuple(steps)


def _execution(stage: Stage, scenario: Scenario, samples: int) -> RoundStep:
    times = [
        replica_times(scenario, stage, replica, end - first)
        for replica, (first, end) in zip(stage.replicas, stage.intervals(samples), strict=True)
    ]
    devices = _devices(stage)
    sync_s = 0.0
    if len(devices) > 1:
        rate_bps = least_rate_bps(scenario, devices, devices)
        sync_s = group_sync_s(scenario, (stage.first_layer, stage.end_layer), len(devices), rate_bps)
    return RoundStep(max(each.forward_s for each in times), max(each.backward_s for each in times), sync_s)


def _devices(stage: Stage) -> tuple[str, ...]:
    return tuple(replica.device for replica in stage.replicas)


def transfer_step(scenario: Scenario, boundary: int, samples: int, rate_bps: float) -> RoundStep:
    """Return the communication step that transfers the output of layer ``boundary`` - 1 between two groups.

    The whole microbatch of ``samples`` samples is sent at ``rate_bps``, the lowest rate between the groups
    [second-hand]. Latency is not counted, since it is negligible in a LAN.
    """
    time_s = 8 * samples * scenario.model.layers[boundary - 1].output_bytes / rate_bps
    return RoundStep(time_s, time_s, is_transfer=True)


def group_sync_s(scenario: Scenario, layers: tuple[int, int], devices: int, rate_bps: float) -> float:
    """Return T_a: the time in which a ring of ``devices`` devices sums the gradients of layers, seconds.

    ``layers`` is (first layer, index after the last layer).
    """
    bits = 8 * scenario.model.parameter_bytes(*layers)
    return 2 * (devices - 1) / devices * bits / rate_bps


def least_rate_bps(scenario: Scenario, senders: tuple[str, ...], receivers: tuple[str, ...]) -> float:
    """Return the rate of the slowest path from one group to another, or inside one, bits per second."""
    return min(nominal_path(scenario, a, b).rate_bps for a in senders for b in receivers if a != b)
