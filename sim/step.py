"""A step of a run: its compiled actions and messages, their durations, and its progress."""

from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from planner.adapt.adaptation import Adaptation
from planner.cost.device_speed import jitter_factors
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.compile import CompiledStep, compile_step, compute_numbers
from planner.step.evaluate import blocking_messages, jitter_delays_s, message_times, nominal_paths
from planner.step.graph import Floats
from sim.kernel.advance import StepState, StepTimes, new_state
from sim.network.connection import Message
from sim.network.network import Network


@dataclass(eq=False, slots=True)
class StepRun:
    """One step of a run.

    Attributes:
        compiled: Actions and messages of the step.
        times: Durations of actions and messages.
        state: What has happened so far.
        unfinished: Number of actors that have not finished the step, plus the number of messages on shared lines that
            have not departed.
        begun_s: When each actor began the step, nan before, seconds, [actors].
        posted_s: When each actor posted its receives of the step, nan before, seconds, [actors].
        unposted: By receiving actor, pairs (line, message) of the messages whose receives are not posted.
    """

    number: int
    plan: Plan
    compiled: CompiledStep
    times: StepTimes
    state: StepState
    unfinished: int
    begun_s: Floats
    posted_s: Floats
    unposted: dict[int, list[tuple[int, Message]]] = field(default_factory=dict)

    @property
    def over_s(self) -> float:
        """Time at which a finished step's last action has ended and its last message has arrived, seconds."""
        return float(np.nanmax(np.concatenate((self.state.end_s, self.state.arrival_s))))

    @property
    def working(self) -> list[int]:
        """Actors that have begun the step and not finished it."""
        graph = self.compiled.graph
        begun = ~np.isnan(self.begun_s)
        working = (self.state.position < graph.first_action[1:]) | (self.state.sending > 0)
        return np.flatnonzero(begun & working).tolist()


class StepRuns(dict[int, StepRun]):
    """Unfinished steps by their number; a missing step is created on first access."""

    def __init__(self, plan: Plan, adaptation: Adaptation | None, scenario: Scenario, network: Network) -> None:
        super().__init__()
        self._plan = plan
        self._adaptation = adaptation
        self._scenario = scenario
        # Steps of several plans are under way at once, if they have the same layers on the same devices. The cache ends
        # with the epoch, since it holds the network.
        self._times = lru_cache(maxsize=8)(partial(_times, scenario=scenario, network=network))

    def __missing__(self, number: int) -> StepRun:
        plan = self._plan if self._adaptation is None else self._adaptation.plan_for(number)
        compiled = compile_step(plan, self._scenario)
        times = self._times(plan)
        compute = self._scenario.effects.compute
        if compute.jitter > 0:
            factors = jitter_factors(compute.seed, number, compiled.graph.actions, compute.jitter)
            # All segments of an action have the same factor, so that gradient buckets do not change the action's
            # duration.
            times = times._replace(duration_s=times.duration_s * factors[compute_numbers(compiled)])
        actors = compiled.graph.actors
        unknown_s = np.full(actors, np.nan)
        self[number] = StepRun(
            number, plan, compiled, times, new_state(compiled.graph), actors, unknown_s, unknown_s.copy()
        )
        return self[number]


def _times(plan: Plan, scenario: Scenario, network: Network) -> StepTimes:
    """Return the durations of actions and messages in every step of a plan, without the jitter of actions."""
    compiled = compile_step(plan, scenario)
    paths = nominal_paths(plan, scenario)
    transmission_s, latency_s = message_times(compiled, paths)
    # On lines of varying latency; `message_times` includes the hand-over in the other latencies.
    jitter_s = jitter_delays_s(compiled, paths) + scenario.effects.network.handover_s
    graph, actors = compiled.graph, compiled.actors
    pairs = zip(graph.channel_sender.tolist(), graph.channel_receiver.tolist(), strict=True)
    line = np.array([network.number[actors[sender], actors[receiver]] for sender, receiver in pairs], np.int64)
    wire_bits = 8 * compiled.messages.size_bytes / scenario.effects.network.payload_efficiency
    blocking = blocking_messages(compiled, plan, scenario)
    return StepTimes(
        compiled.actions.duration_s,
        transmission_s,
        wire_bits,
        latency_s,
        jitter_s,
        line,
        blocking,
        compiled.messages.copy_out_s,
        compiled.messages.copy_in_s,
    )
